"""The acceptance rate of some requests, with an interval that allows for requests that differ."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from driftguard.records.documents.acceptance import Acceptance
from driftguard.records.positions import Positions

LEVEL = 0.95
WINDOW_DEVIATION = 0.01


def acceptance_of(
    drafted: NDArray[np.int64],
    accepted: NDArray[np.int64],
    *,
    of_windows: bool = False,
    positions: Positions = "all",
) -> Acceptance:
    """Of n >= 1 requests (or windows), each with drafted > 0."""
    d, a = drafted.astype(np.float64), accepted.astype(np.float64)
    sums = (float(column.sum()) for column in (d, a, d * d, d * a, a * a))
    return acceptance_from_sums(len(d), *sums, of_windows=of_windows, positions=positions)


def acceptance_from_sums(
    requests: float,
    drafted: float,
    accepted: float,
    drafted2: float,
    both: float,
    accepted2: float,
    *,
    of_windows: bool = False,
    positions: Positions = "all",
) -> Acceptance:
    """From sums over n requests of d, a, d^2, d a and a^2.

    Formula: rate r = sum a / sum d; interval r +- t se with the linearised (delta method) standard
    error of a ratio of sums, se = sqrt(n s^2) / sum d, s^2 = sum (a - r d)^2 / (n - 1), t the Student
    quantile of n - 1 degrees of freedom. Requests are the units, never tokens: the binomial error of
    tokens is too small by a factor of 2 to 40. se is at least 1/n, because n requests cannot exclude
    that one in n behaves differently; a window is a mean of many, with a deviation of at least .01.
    Assumptions: independent requests; n of a few dozen or more for the level to hold well.
    Paper: Cochran, Sampling Techniques (1977), section 6.3.
    """
    rate = accepted / drafted
    if requests < 2:
        return Acceptance(rate, 0.0, 1.0, int(requests), positions)
    squares = max(accepted2 - 2.0 * rate * both + rate * rate * drafted2, 0.0)
    error = math.sqrt(requests * squares / (requests - 1)) / drafted
    least = WINDOW_DEVIATION / math.sqrt(requests) if of_windows else 1.0 / requests
    half = float(stdtrit(requests - 1, 0.5 + LEVEL / 2)) * max(error, least)
    return Acceptance(rate, max(rate - half, 0.0), min(rate + half, 1.0), int(requests), positions)
