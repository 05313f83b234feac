"""The reference period of a segment, and the safe baselines that the bets are made against.

Sums over the reference period are kept per segment [.., SUMS]; their order is fixed here.

What sessions need later (design §7): the same sums clustered by session, for the standard error.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.acceptance import acceptance_from_sums
from driftguard.detection.findings import Acceptance

Floats = NDArray[np.float64]

SUMS = 8  # requests n, x, x^2, drafted d, accepted a, d^2, d a, a^2
FIRST_CHECK = 100  # requests after which the spread is first estimated
SIZE_FACTOR = 8.0  # a reference of (8 sd / drop)^2 requests puts two standard errors at a quarter of the drop


@dataclass(frozen=True, slots=True)
class Baselines:
    """Of C segments: mean and variance of x = accepted / drafted per request, and the boundaries."""

    mean: Floats
    variance: Floats
    fall_below: Floats  # m_c
    rise_above: Floats  # its mirror image


def terms(x: Floats, drafted: NDArray[np.int64], accepted: NDArray[np.int64]) -> Floats:
    """What each of T requests adds to the sums: [T, SUMS]."""
    d, a = drafted.astype(np.float64), accepted.astype(np.float64)
    return np.stack([np.ones_like(x), x, x * x, d, a, d * d, d * a, a * a], axis=1)


def add_terms(sums: Floats, added: Floats) -> Floats:
    """sums [SUMS] + each of added [T, SUMS], one after the other, so that batching changes no bit."""
    total: Floats = np.add.accumulate(np.vstack([sums, added]), axis=0)[-1]
    return total


def variance_of(sums: Floats) -> Floats:
    """Between-request variance of x, from sums [..., SUMS] with n >= 2; 0 where n < 2."""
    n = sums[..., 0]
    squares = sums[..., 2] - sums[..., 1] ** 2 / np.maximum(n, 1.0)
    return np.where(n >= 2, np.maximum(squares, 0.0) / np.maximum(n - 1.0, 1.0), 0.0)


def needed_requests(sums: Floats, minimum_drop: float) -> int:
    """Size of the reference period, from the spread seen so far (sums [SUMS]).

    n = (8 sd / minimum_drop)^2, at least 8 / minimum_drop and at least FIRST_CHECK. The floor is the
    same rule for sd^2 = 1/n, the spread that n equal requests cannot exclude. The size looks at the
    spread only, never at the mean, so stopping there does not select a flattering mean.
    """
    spread = SIZE_FACTOR / minimum_drop
    wanted = spread**2 * float(variance_of(sums))
    return max(FIRST_CHECK, math.ceil(spread), math.ceil(wanted))


def baselines(sums: Floats, ignore: float) -> Baselines:
    """From reference sums [C, SUMS] of complete reference periods.

    Formula: m = mean - max(2 se, ignore), upward mirrored; se = sqrt(max(v, 1/n) / n), v the variance
    between requests (not binomial, which is wrong by a factor of 2 to 40 on such data).
    Assumptions: requests of the reference period are independent and in control.
    Guarantee: the false-alarm guarantee is conditional on the true mean lying above m, which fails in
    about 2% of segments when 2 se decides; a mean that lies a further standard error below m still
    loses most bets, because each pays for its own variance.
    """
    n = np.maximum(sums[..., 0], 1.0)
    mean = sums[..., 1] / n
    variance = variance_of(sums)
    margin = np.maximum(2.0 * np.sqrt(np.maximum(variance, 1.0 / n) / n), ignore)
    return Baselines(mean, variance, np.clip(mean - margin, 0.0, 1.0), np.clip(mean + margin, 0.0, 1.0))


def reference_acceptance(sums: Floats) -> Acceptance:
    """Acceptance rate of one reference period, from its sums [SUMS] with n >= 1."""
    n, _, _, drafted, accepted, drafted2, both, accepted2 = (float(value) for value in sums)
    return acceptance_from_sums(n, drafted, accepted, drafted2, both, accepted2)
