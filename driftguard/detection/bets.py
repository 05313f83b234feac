"""Bets that the acceptance of a request lies below (or above) a boundary.

One bet on x in [0, 1] against the null E[x | past] >= m is e = 1 + lambda (m - x), lambda > 0: its
expectation under the null is at most 1, whatever the distribution of x. With

    lambda_j = min(delta_j / (v + delta_j^2), .98 / (1 - m))

it is close to the growth-optimal bet when the mean fell by delta_j and the variance is v (the
maximiser of lambda delta - lambda^2 (v + delta^2) / 2), and the cap keeps e >= .02 for every x in
[0, 1]. v only steers the speed: a wrong v cannot break the guarantee. A rise is the same bet on
1 - x with the boundary 1 - m.

Sums of bets: R <- (1 + R) e, that is R_t = sum over k <= t of the product of e_k .. e_t: one bet
started at every request. Under the null R_t - t is a supermartingale (Shin, Ramdas, Rinaldo 2023,
"E-detectors", Shiryaev-Roberts form), so the first time that R >= A comes after at least A requests
in expectation.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import repeat

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

BETS = 10
LANES = 2 * BETS  # bets on a fall, then bets on a rise
DELTAS: Floats = np.geomspace(0.01, 0.35, BETS)
DOWN, UP = slice(0, BETS), slice(BETS, LANES)
LARGEST_STAKE = 0.98  # part of the wealth that one request can lose
LARGEST_SUM = 1e290
SMALLEST_VARIANCE = 1e-4  # constant acceptance in the reference period: a spread of one per cent


def stakes(boundary: Floats, variance: Floats, fresh: Floats | None = None) -> Floats:
    """lambda_j of bets that the mean lies below `boundary` [...], as [..., BETS].

    `fresh` [...] is the part of a change that this request would show (1 by default): lambda_j is that
    of the drop fresh x delta_j, and 0 where fresh is.
    """
    spread = np.maximum(variance, SMALLEST_VARIANCE)[..., None]
    drops = DELTAS if fresh is None else DELTAS * fresh[..., None]
    wanted = drops / (spread + drops**2)
    room = np.maximum(1.0 - boundary, 1e-9)[..., None]
    return np.minimum(wanted, LARGEST_STAKE / room)


def mean_over_bets(evidence: Floats) -> Floats:
    """Equal-weight mixture over the bets: [..., BETS] -> [...].

    Added bet by bet: numpy's own mean may add in another order for another shape, and the sums must
    not depend on how the records were batched.
    """
    total = evidence[..., 0].copy()
    for bet in range(1, BETS):
        total += evidence[..., bet]
    total /= BETS
    return total


def factors(x: Floats, boundary: Floats, stake: Floats, *, rise: bool) -> Floats:
    """e_tj of requests x [T] against boundary [T] with stakes [T, BETS]: [T, BETS], each at least .02."""
    gain = x - boundary if rise else boundary - x
    return 1.0 + stake * gain[:, None]


def run_sums(start: Floats, bets: Floats, starts: Iterable[float] | None = None) -> Floats:
    """R_t = (R_{t-1} + w_t) e_t for every t, from R_0 = `start` [W]; overwrites `bets` [T, W] with it.

    `starts` are the w_t: what is put on bets that begin at request t (1 in an e-detector, the default).
    The loop over time is sequential on purpose: every state is then bit for bit the same however the
    requests were batched.
    """
    weights: Iterable[float | Floats]
    weights = repeat(np.ones_like(start)) if starts is None else starts  # an array adds faster than a float
    current = start
    with np.errstate(over="ignore"):
        for row, weight in zip(bets, weights, strict=False):
            np.multiply(current + weight, row, row)
            current = row
    # Only rows past an alarm, which are thrown away, can grow so far; they must still add up.
    return np.minimum(bets, LARGEST_SUM, out=bets)
