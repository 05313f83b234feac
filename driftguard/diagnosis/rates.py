"""Acceptance rates with errors that allow for requests that differ, and comparisons of two of them."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from scipy.special import stdtr, stdtrit

LEVEL = 0.01  # of every deciding test
LARGEST_ERROR = 0.5  # of a rate: what lies between 0 and 1 has no larger standard deviation


@dataclass(frozen=True, slots=True)
class Rate:
    """sum(accepted) / sum(drafted) of n requests, with its standard error: finite, see `rate_of`."""

    requests: int
    drafted: int
    rate: float
    error: float


@dataclass(frozen=True, slots=True)
class Difference:
    """after - before, with an interval at 99% and the two-sided p-value of "no difference"."""

    change: float
    low: float
    high: float
    p_value: float


def rate_of(counts: Iterable[tuple[int, int]]) -> Rate | None:
    """Of (drafted, accepted) pairs; None where nothing was drafted.

    Formula: r = sum a / sum d with the linearised standard error of a ratio of sums,
    se = sqrt(n s^2) / sum d, s^2 = sum (a - r d)^2 / (n - 1). Requests are the units, never tokens.
    One request tells nothing about how requests differ: its error is then LARGEST_ERROR, which is never too
    small. Assumption: independent requests.
    Paper: Cochran, Sampling Techniques (1977), section 6.3.
    """
    pairs = [pair for pair in counts if pair[0] > 0]
    drafted = sum(pair[0] for pair in pairs)
    if drafted == 0:
        return None
    n, rate = len(pairs), sum(pair[1] for pair in pairs) / drafted
    if n == 1:
        return Rate(1, drafted, rate, LARGEST_ERROR)
    squares = sum((a - rate * d) ** 2 for d, a in pairs)
    return Rate(n, drafted, rate, math.sqrt(n * squares / (n - 1)) / drafted)


def difference(before: Rate, after: Rate, level: float = 0.99) -> Difference:
    """Welch's comparison of two independent rates.

    Formula: t = (r1 - r0) / sqrt(se0^2 + se1^2), Student with Welch-Satterthwaite degrees of freedom.
    A side of one request says nothing. Assumptions: independent requests, some dozens on each side; the
    level is approximate.
    Paper: Welch, Biometrika 34 (1947).
    """
    change = after.rate - before.rate
    if min(before.requests, after.requests) < 2:
        return interval(change, math.inf, 1.0, level)
    return interval(change, _welch_error(before, after), _welch_freedom(before, after), level)


def interval(change: float, error: float, freedom: float, level: float = 0.99) -> Difference:
    """change +- t error, and the two-sided p-value of change = 0. All are finite: an infinite error says
    nothing, which is an interval of -1 to 1."""
    if math.isinf(error):
        return Difference(change, -1.0, 1.0, 1.0)
    if error == 0.0:
        return Difference(change, change, change, 1.0 if change == 0.0 else 0.0)
    half = float(stdtrit(freedom, 0.5 + level / 2)) * error
    p_value = 2.0 * float(stdtr(freedom, -abs(change) / error))
    return Difference(change, change - half, change + half, p_value)


def _welch_error(before: Rate, after: Rate) -> float:
    return math.hypot(before.error, after.error)


def _welch_freedom(before: Rate, after: Rate) -> float:
    parts = before.error**4 / (before.requests - 1) + after.error**4 / (after.requests - 1)
    return _welch_error(before, after) ** 4 / parts if parts > 0 else 1.0
