"""The reference period of a stratum, and the baseline that it gives.

Sums over the reference period are kept per stratum [.., SUMS]; their order is fixed here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.acceptance import acceptance_from_sums
from driftguard.detection.findings import Acceptance

Floats = NDArray[np.float64]

# requests n, x, x^2, drafted d, accepted a, d^2, d a, a^2, log length l, l^2, l x
SUMS = 11
FIRST_CHECK = 100  # requests after which the spread is first estimated
SIZE_FACTOR = 8.0  # a reference of (8 sd / drop)^2 requests puts two standard errors at a quarter of the drop
SMALLEST_LENGTH_SPREAD = 0.05  # sd of log length below which lengths are all alike


@dataclass(frozen=True, slots=True)
class Baselines:
    """Of C strata with x = accepted / drafted per request and l = log length."""

    mean: Floats  # of x
    slope: Floats  # of x on l; 0 where lengths are not known or all alike
    middle: Floats  # mean of l
    variance: Floats  # of x around the line
    mean_error: Floats  # standard error of the mean
    slope_error: Floats


def terms(x: Floats, log_length: Floats, drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> Floats:
    """What each of T requests adds to the sums: [T, SUMS]."""
    d, a, line = drafted.astype(np.float64), accepted.astype(np.float64), log_length
    return np.stack(
        [np.ones_like(x), x, x * x, d, a, d * d, d * a, a * a, line, line * line, line * x], axis=1
    )


def add_terms(sums: Floats, added: Floats) -> Floats:
    """sums [SUMS] + each of added [T, SUMS], one after the other, so that batching changes no bit."""
    total: Floats = np.add.accumulate(np.vstack([sums, added]), axis=0)[-1]
    return total


def _line(sums: Floats) -> tuple[Floats, Floats, Floats]:
    """(slope, sum of squares of l around its mean, sum of squares of x around the line) from [..., SUMS].

    The slope is 0, and the middle sum 0, where lengths are all alike.
    """
    n = np.maximum(sums[..., 0], 1.0)
    lengths = np.maximum(sums[..., 9] - sums[..., 8] ** 2 / n, 0.0)
    differ = lengths > SMALLEST_LENGTH_SPREAD**2 * n
    both = sums[..., 10] - sums[..., 8] * sums[..., 1] / n
    slope = np.where(differ, both / np.where(differ, lengths, 1.0), 0.0)
    squares = sums[..., 2] - sums[..., 1] ** 2 / n - slope * both
    return slope, np.where(differ, lengths, 0.0), np.maximum(squares, 0.0)


def variance_of(sums: Floats) -> Floats:
    """Variance of x between requests around the line, from sums [..., SUMS]; 0 where n is too small."""
    n = sums[..., 0]
    _, lengths, squares = _line(sums)
    freedom = n - 1.0 - (lengths > 0.0)
    return np.where(freedom >= 1.0, squares / np.maximum(freedom, 1.0), 0.0)


def needed_requests(sums: Floats, minimum_drop: float) -> int:
    """Size of the reference period, from the spread seen so far (sums [SUMS]).

    n = (8 sd / minimum_drop)^2, at least 8 / minimum_drop and at least FIRST_CHECK. The floor is the
    same rule for sd^2 = 1/n, the spread that n equal requests cannot exclude. The size looks at the
    spread only, never at the mean, so stopping there does not select a flattering mean.
    """
    spread = SIZE_FACTOR / minimum_drop
    wanted = spread**2 * float(variance_of(sums))
    return max(FIRST_CHECK, math.ceil(spread), math.ceil(wanted))


def baselines(sums: Floats) -> Baselines:
    """From reference sums [C, SUMS] of complete reference periods.

    Formula: x = mean + slope (l - middle) by least squares, l the logarithm of output_tokens; variance v
    around that line; standard errors sqrt(max(v, 1/n) / n) of the mean and sqrt(v / sum (l - middle)^2)
    of the slope. v is the variance between requests, not binomial, which is wrong by a factor of 2 to 40.
    Assumptions: requests of the reference period are independent and in control; acceptance is linear
    in log length.
    Against four buckets of length as strata (tests/benchmarks/bench_length.py: sd .12, correlation -.5
    and -.7) the line needs a seventh of the requests until 90% of the traffic is watched (about 400
    against 3,000), finds a drop of .05 or .10 as soon, and raises a false alarm in 0 to 1 of 12 runs
    where lengths shift by one or two standard deviations (buckets: 1 to 12 of 12, because the lengths
    shift inside a bucket too). Where the true relation is a step, neither holds at a shift of two.
    """
    n = np.maximum(sums[..., 0], 1.0)
    slope, lengths, _ = _line(sums)
    variance = variance_of(sums)
    with_spread = lengths > 0.0
    slope_error = np.where(with_spread, np.sqrt(variance / np.where(with_spread, lengths, 1.0)), 0.0)
    return Baselines(
        mean=sums[..., 1] / n,
        slope=slope,
        middle=sums[..., 8] / n,
        variance=variance,
        mean_error=np.sqrt(np.maximum(variance, 1.0 / n) / n),
        slope_error=slope_error,
    )


def reference_acceptance(sums: Floats) -> Acceptance:
    """Acceptance rate of one reference period, from its sums [SUMS] with n >= 1."""
    n, _, _, drafted, accepted, drafted2, both, accepted2 = (float(value) for value in sums[:8])
    return acceptance_from_sums(n, drafted, accepted, drafted2, both, accepted2)
