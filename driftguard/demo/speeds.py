"""Comparing speeds that were measured in turns: what else the machine did slowed all of them alike."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scipy import stats

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Change:
    """Of tokens per second: 0.2 is 20% faster. low, high: its 95% interval."""

    value: float
    low: float
    high: float

    @property
    def conclusive(self) -> bool:
        return self.low > 0.0 or self.high < 0.0

    @property
    def interval(self) -> str:
        return f"{_percent(self.low)} to {_percent(self.high)}"

    @property
    def text(self) -> str:
        value = _percent(self.value) if self.conclusive else "inconclusive"
        return f"{value} ({self.interval})"


def change(speeds: Sequence[float], against: Sequence[float]) -> Change:
    """From `against` to `speeds`, tokens per second of each turn, [turns], at least two.

    Formula: exp(m -/+ t s / sqrt(n)) - 1, where m and s are mean and standard deviation of the n logarithms
    of the ratio within a turn, and t is Student's quantile for n - 1 degrees of freedom.
    Assumption: these logarithms are independent between turns, and about normal.
    Source: Student, The probable error of a mean, Biometrika 6 (1908), for paired differences.
    """
    ratios = [math.log(one / other) for one, other in zip(speeds, against, strict=True)]
    test = stats.ttest_1samp(ratios, 0.0)
    low, high = test.confidence_interval(LEVEL)
    return Change(math.expm1(math.fsum(ratios) / len(ratios)), math.expm1(low), math.expm1(high))


def typical(speeds: Sequence[float]) -> float:
    """The geometric mean, whose ratios are what `change` tells."""
    return math.exp(math.fsum(map(math.log, speeds)) / len(speeds))


def _percent(part: float) -> str:
    return f"{100 * part:+.0f}%"
