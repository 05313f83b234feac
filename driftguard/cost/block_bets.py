"""Bets on blocks of requests, and the evidence that they make. Derived in `goodput.py`. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

STAKES: Final = (0.3, 0.6, 0.95)
REACH: Final = 8.0
SURE_STAKES: Final = (0.3, 0.6, 1.2)  # of bets whose mean is 1 at most by the variance alone
NONE: Final = (0.0,) * len(STAKES)


def bet(sums: Sequence[float], z: float, begun: float = 1.0) -> tuple[float, ...]:
    """Sums of bets, one for each stake, after a block at z standard deviations. `begun`: what is put on bets
    that begin with it."""
    z = min(max(z, -1.0), REACH)
    return tuple(
        min((begun + total) * (1.0 + stake * z), 1e12)
        for total, stake in zip(sums or NONE, STAKES, strict=True)
    )


def bet_of_unit_variance(sums: Sequence[float], z: float) -> tuple[float, ...]:
    """As `bet`, and worth at most 1 on average where z has a mean of 0 at most and a variance of 1 at most,
    whatever its distribution: (1 + x + x^2 / 3) / (1 + stake^2 / 3) with x = max(stake z, -1.5), below which
    the parabola would rise again."""
    found = []
    for total, stake in zip(sums or NONE, SURE_STAKES, strict=True):
        x = max(stake * min(z, REACH), -1.5)
        found.append(min((1.0 + total) * (1.0 + x + x * x / 3.0) / (1.0 + stake * stake / 3.0), 1e12))
    return tuple(found)


def evidence_of(sums: Sequence[float]) -> float:
    return sum(sums) / len(STAKES) if sums else 0.0
