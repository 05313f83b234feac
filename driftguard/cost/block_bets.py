"""Bets on blocks of requests, and the evidence that they make. Derived in `goodput.py`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

STAKES: Final = (0.3, 0.6, 0.95)
REACH: Final = 8.0
NONE: Final = (0.0,) * len(STAKES)


def bet(sums: Sequence[float], z: float, begun: float = 1.0) -> tuple[float, ...]:
    """Sums of bets, one for each stake, after a block at z standard deviations. `begun`: what is put on bets
    that begin with it."""
    z = min(max(z, -1.0), REACH)
    return tuple(
        min((begun + total) * (1.0 + stake * z), 1e12)
        for total, stake in zip(sums or NONE, STAKES, strict=True)
    )


def evidence_of(sums: Sequence[float]) -> float:
    return sum(sums) / len(STAKES) if sums else 0.0
