"""How much of a move of the aggregate is the mix of its parts, and how much their own acceptance."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from driftguard.diagnosis.evidence import Observed
from driftguard.diagnosis.rates import Rate, rate_of

Cell = TypeVar("Cell", bound=Hashable)
_QUANTILE_99 = 2.575829303548901  # of the normal distribution, two-sided
STEADY_SHARE = 0.25  # of the aggregate's move; what the parts' own changes may add up to


@dataclass(frozen=True, slots=True)
class Decomposition:
    """total = mix + within, exactly. `overlap`: part of the drafted tokens that lies in parts known on both
    sides, sum min(w0, w1); `within_error`: standard error of `within`."""

    before: float
    after: float
    mix: float
    within: float
    within_error: float
    overlap: float

    @property
    def total(self) -> float:
        return self.after - self.before

    @property
    def mix_share(self) -> float:
        """Part of the move that the mix explains, between 0 and 1; 0 where nothing moved."""
        return min(max(self.mix / self.total, 0.0), 1.0) if self.total else 0.0

    @property
    def is_mix_alone(self) -> bool:
        """The mix moved the aggregate, and the parts' own changes are small and not shown (99%)."""
        unshown = abs(self.within) <= _QUANTILE_99 * self.within_error
        return unshown and abs(self.within) <= STEADY_SHARE * abs(self.total)


def decompose(before: Mapping[Cell, Rate], after: Mapping[Cell, Rate]) -> Decomposition | None:
    """The move of the ratio of sums r = sum_c w_c x_c, w_c a part's share of the drafted tokens.

    Formula (Kitagawa, JASA 50, 1955), exact for every input:
        r1 - r0 = sum_c (w1_c - w0_c) (x0_c + x1_c) / 2  +  sum_c (w0_c + w1_c) / 2 (x1_c - x0_c)
                  = mix                                  +  within
    A part seen on one side only has no change of its own, so it counts as mix.
    within_error assumes independent requests. None where one side is empty.
    """
    if not before or not after:
        return None
    weights0, weights1 = _weights(before), _weights(after)
    mix = within = variance = overlap = 0.0
    for cell in {**before, **after}:
        w0, w1 = weights0.get(cell, 0.0), weights1.get(cell, 0.0)
        x0, x1 = before.get(cell, after.get(cell)), after.get(cell, before.get(cell))
        assert x0 is not None and x1 is not None  # noqa: S101, PT018 (one side has it)
        mix += (w1 - w0) * (x0.rate + x1.rate) / 2
        within += (w0 + w1) / 2 * (x1.rate - x0.rate)
        overlap += min(w0, w1)
        if x0 is not x1:
            variance += ((w0 + w1) / 2) ** 2 * (x0.error**2 + x1.error**2)
    total0 = sum(weights0[cell] * before[cell].rate for cell in before)
    total1 = sum(weights1[cell] * after[cell].rate for cell in after)
    return Decomposition(total0, total1, mix, within, math.sqrt(variance), overlap)


def _weights(rates: Mapping[Cell, Rate]) -> dict[Cell, float]:
    total = sum(rate.drafted for rate in rates.values())
    return {cell: rate.drafted / total for cell, rate in rates.items()}


def rates_by(
    requests: Iterable[Observed], cell_of: Callable[[Observed], Cell]
) -> dict[tuple[Cell, bool], Rate]:
    """Acceptance of each part, of requests judged by their first position apart from the others; parts in
    which nothing was drafted are left out."""
    parts: dict[tuple[Cell, bool], list[tuple[int, int]]] = {}
    for one in requests:
        parts.setdefault((cell_of(one), one.by_first), []).append(one.judged)
    return {cell: rate for cell, counts in parts.items() if (rate := rate_of(counts)) is not None}


def of_segments(before: Sequence[Observed], after: Sequence[Observed]) -> Decomposition | None:
    """The decomposition over segments."""
    return decompose(rates_by(before, lambda one: one.segment), rates_by(after, lambda one: one.segment))
