"""The Mann-Whitney test. Written out, because importing scipy.stats would cost every command a second."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import ndtr


@dataclass(frozen=True, slots=True)
class RankComparison:
    """`superiority`: P(after > before) + P(after = before) / 2; both p-values are of "no difference"."""

    superiority: float
    p_rose: float  # one-sided
    p_value: float  # two-sided


def compare(before: Sequence[float], after: Sequence[float]) -> RankComparison:
    """U = number of pairs with after > before, ties count half; both samples hold at least one value.

    p by the normal approximation with midranks, tie correction and continuity correction:
    var U = n m / 12 (N + 1 - sum (t^3 - t) / (N (N - 1))), t the sizes of the groups of equal values.
    Assumption: independent values, some ten or more on each side.
    Paper: Mann, Whitney, Ann. Math. Stat. 18 (1947); ties as in Lehmann, Nonparametrics (1975), section 1.4.
    """
    n, m = len(after), len(before)
    _, places, sizes = np.unique(np.array([*after, *before]), return_inverse=True, return_counts=True)
    midranks = np.cumsum(sizes) - (sizes - 1) / 2
    u = float(midranks[places[:n]].sum()) - n * (n + 1) / 2
    total = n + m
    ties = float(np.sum(sizes.astype(np.float64) ** 3 - sizes))
    variance = n * m / 12 * (total + 1 - ties / (total * (total - 1)))
    if variance <= 0.0:  # all values are equal
        return RankComparison(0.5, 1.0, 1.0)
    away = u - n * m / 2
    p_rose = float(ndtr(-(away - 0.5) / math.sqrt(variance)))
    p_value = min(2.0 * float(ndtr(-(abs(away) - 0.5) / math.sqrt(variance))), 1.0)
    return RankComparison(u / (n * m), p_rose, p_value)
