"""Bets that the acceptance of a request lies below (or above) a boundary.

One bet on x in [0, 1] against the null E[x | past] >= m is e = 1 + lambda (m - x), lambda > 0: its
expectation under the null is at most 1, whatever the distribution of x. The growth-optimal stake on a
fall of delta is about lambda = delta / v, v the variance of x; but e must stay positive at x = 1, which
allows 1 / (1 - m) only: too little where acceptance is low, or where the fall is large. A request that
accepts much more than expected therefore counts as one that accepts REACH_j standard deviations more:

    z = (m - x) / sd    e_j = 1 + s_j (max(z, -REACH_j) - b_j)    s_j = min(STAKES_j, .98 / (REACH_j + b_j))

b_j makes up for what is cut off: the mean of (-z - REACH_j)+ over the reference period (`cut_off`). Where
it is not known nothing is cut: REACH_j is then (1 - m) / sd and b_j is 0. e >= .02 for every x. A rise is
the mirror image.

Assumptions: E[x | past] >= m and, where requests are cut, E[(-z - REACH_j)+ | past] <= b_j: the best
requests are no better than in the reference period. Beyond that v only steers the speed.
Most STAKES lie between .3 and .5, best for falls of .05 and .10 at sd .13, where time is lost: a nat of
evidence takes 15 requests after a fall of .05. The two largest, whose reach is a third of a standard
deviation and none, are for falls of .20 and more: .83 nats per request, where a stake of .90 gives .70. One
more of them saves .5 nats there; one below .19, best for falls under .03, would only take from the others.

Sums of bets: R <- (1 + R) e, that is R_t = sum over k <= t of the product of e_k .. e_t: one bet
started at every request. Under the null R_t - t is a supermartingale (Shin, Ramdas, Rinaldo 2023,
"E-detectors", Shiryaev-Roberts form), so the first time that R >= A comes after at least A requests
in expectation.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

Floats = NDArray[np.float64]

BETS = 10
LANES = 2 * BETS  # bets on a fall, then bets on a rise
STAKES: Floats = np.array([0.19, 0.28, 0.34, 0.38, 0.42, 0.46, 0.65, 0.90, 1.60, 2.30])  # of 1 / sd
SUDDEN = STAKES >= 0.6
DOWN, UP = slice(0, BETS), slice(BETS, LANES)
LARGEST_STAKE = 0.98  # part of the wealth that one request can lose
LARGEST_SUM = 1e290
SMALLEST_VARIANCE = 1e-4  # constant acceptance in the reference period: a spread of one per cent


def _normal_cut_off(reach: Floats) -> Floats:
    """E[(Z - reach)+] of a standard normal Z."""
    loss: Floats = np.exp(-reach * reach / 2.0) / np.sqrt(2.0 * np.pi) - reach * ndtr(-reach)
    return loss


def _reach() -> Floats:
    """As far as the stakes allow: STAKES (reach + what is cut off of a normal x) = .98."""
    reach = LARGEST_STAKE / STAKES
    for _ in range(40):  # each halves the error, at least
        reach = LARGEST_STAKE / STAKES - _normal_cut_off(reach)
    return reach


REACH = _reach()
NORMAL_CUT_OFF: Floats = np.tile(_normal_cut_off(REACH), 2)  # [LANES]
NOT_CUT: Floats = np.full(LANES, np.nan)


def cut_off(x: Floats) -> Floats:
    """b_j [LANES] of the bets, from requests [T] whose acceptance varies; NOT_CUT where it does not."""
    deviation = float(x.std())
    if deviation**2 < SMALLEST_VARIANCE:
        return NOT_CUT
    z = (x - x.mean()) / deviation
    above = [np.maximum(side[:, None] - REACH, 0.0).mean(axis=0) for side in (z, -z)]
    return np.concatenate(above)


@dataclass(frozen=True, slots=True, eq=False)
class Offers:
    """What T requests can be bet on: a stake of s on bet j gives e_tj = 1 + min(s, most_tj) gain_tj."""

    gain: Floats  # [T, BETS]
    most: Floats  # [T, BETS]

    def factors(self, stakes: Floats) -> Floats:
        """e_tj [T, BETS], each at least .02."""
        bets: Floats = 1.0 + np.minimum(stakes, self.most) * self.gain
        return bets


def offers(x: Floats, boundary: Floats, variance: Floats, *, rise: bool, cut: Floats | None = None) -> Offers:
    """Of requests x [T] against boundary [T] with variance [T], in its standard deviations.

    `cut` [T, BETS] (or [BETS]) are the b_j; where NaN, and by default, nothing is cut.
    """
    deviation = np.sqrt(np.maximum(variance, SMALLEST_VARIANCE))
    z = (x - boundary if rise else boundary - x) / deviation
    room = np.maximum(boundary if rise else 1.0 - boundary, 1e-9)[:, None] / deviation[:, None]
    cut = np.full(BETS, np.nan) if cut is None else cut
    known = ~np.isnan(cut)
    reach, lost = np.where(known, np.minimum(REACH, room), room), np.where(known, cut, 0.0)
    return Offers(np.maximum(z[:, None], -reach) - lost, LARGEST_STAKE / (reach + lost))


def stakes(shown: Floats) -> Floats:
    """[T, BETS] for a change at an unknown time of which the requests show `shown` [T]: how much of a lasting
    one, in their standard deviations, against the first request of a session.

    Where it is 0 all stakes are; the SUDDEN ones are otherwise not scaled, because a session that is open
    when acceptance falls shows all of it.
    """
    return STAKES * np.where(SUDDEN, (shown > 0.0)[:, None], shown[:, None])


def factors(
    x: Floats,
    boundary: Floats,
    variance: Floats,
    *,
    rise: bool,
    shown: Floats | None = None,
    cut: Floats | None = None,
) -> Floats:
    """e_tj [T, BETS] of `offers` with the `stakes` for `shown` (1 by default)."""
    offered = offers(x, boundary, variance, rise=rise, cut=cut)
    return offered.factors(STAKES if shown is None else stakes(shown))


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
