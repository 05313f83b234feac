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

**Dependence.** Of observations that are not independent, sums vary more than v says: f times as much in the
long run (`long_run_variance.py`). A bet of stake s grows by about s d - s^2 / 2 per observation that lies d
standard deviations beyond the boundary; its sum over dependent ones would wander, and is therefore
charged for the variance that v leaves out, and staked where that pays best:

    e_j = (1 + s_j (max(z, -REACH_j) - b_j)) exp(-(f - 1) s_j^2 / 2)
    s_j = min(STAKES_j / f, .98 / (REACH_j + b_j))

The assumption E[x | past] >= m is then replaced by: sums of x - m over many observations are about normal,
with variance f v each. The guarantee is approximate there, and measured (docs/measured.md). f is 1 where
observations are independent.

**Sums** run through requests one after the other, of many groups side by side. In round n the n-th request
of every group is added, so that the work of a round is shared by all groups while each sum takes its
requests in their order: bit for bit what it is for the group alone.

**Age.** Where requests come in sessions, the sums know how old their bets are (`aging_sums`). After a
lasting change a request shows all of it against what the earlier requests of its session made it expect, if
those all came before the change; of the part that they pull the expectation along, w = 1 - fresh
(`expectation.py`), nothing is left to see where all came after. A bet that began at t is a bet on a change
at t. Of a session, whose requests are taken to be spread evenly over the time that it has been open, it
therefore sees

    shown = 1 - w min(1, (now - t) / open)

in units of what a first request shows, and stakes so much. One sum holds the bets of all t. What all of
them stake is what a bet of the mean age would, the mean weighted by what each is worth:

    R <- (R + w_t) e       mean start <- (R mean start + w_t now) / (R + w_t)

All of this is known before x is, so that the guarantee of `evidence.py` does not depend on it. With the
bets of every t kept apart it is no faster: in 60 runs of the sessions of tests/benchmarks/detection a drop
of .05, .10 and .20 took 535, 179 and 49 requests then and 540, 178 and 53 with one sum where sessions
follow one another, and 366, 34 and 12 against 385, 34 and 11 where 16 are open at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from itertools import groupby
from typing import Any

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
    """What T requests can be bet on: a stake of s' = min(s / f, most_tj) on bet j gives
    e_tj = (1 + s' gain_tj) exp(-(f - 1) s'^2 / 2)."""

    gain: Floats  # [T, BETS]
    most: Floats  # [T, BETS]
    inflation: Floats  # [T] f

    def factors(self, stakes: Floats) -> Floats:
        """e_tj [T, BETS], each above 0."""
        staked = np.minimum(stakes / self.inflation[:, None], self.most)
        return charged(1.0 + staked * self.gain, staked, self.inflation[:, None])


def charged(bets: Floats, staked: Floats, inflation: Floats) -> Floats:
    """Bets less what dependence costs them."""
    less: Floats = bets * np.exp((1.0 - inflation) * staked * staked / 2.0)
    return less


def offers(
    x: Floats,
    boundary: Floats,
    variance: Floats,
    *,
    rise: bool,
    cut: Floats | None = None,
    inflation: Floats | None = None,
) -> Offers:
    """Of requests x [T] against boundary [T] with variance [T], in its standard deviations.

    `cut` [T, BETS] (or [BETS]) are the b_j; where NaN, and by default, nothing is cut. `inflation` [T] is f,
    1 by default.
    """
    deviation = np.sqrt(np.maximum(variance, SMALLEST_VARIANCE))
    z = (x - boundary if rise else boundary - x) / deviation
    room = np.maximum(boundary if rise else 1.0 - boundary, 1e-9)[:, None] / deviation[:, None]
    cut = np.full(BETS, np.nan) if cut is None else cut
    known = ~np.isnan(cut)
    reach, lost = np.where(known, np.minimum(REACH, room), room), np.where(known, cut, 0.0)
    inflation = np.ones(len(x)) if inflation is None else inflation
    return Offers(np.maximum(z[:, None], -reach) - lost, LARGEST_STAKE / (reach + lost), inflation)


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
    inflation: Floats | None = None,
) -> Floats:
    """e_tj [T, BETS] of `offers` with the `stakes` for `shown` (1 by default)."""
    offered = offers(x, boundary, variance, rise=rise, cut=cut, inflation=inflation)
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


@dataclass(frozen=True, slots=True, eq=False)
class Rounds:
    """T requests of G groups, ordered by round, in each round those of the longest groups first."""

    longest_first: NDArray[np.intp]  # [G]
    sizes: list[int]  # of the rounds: how many groups have so many requests
    place: NDArray[np.intp]  # [T] of each request among all, ordered so

    @classmethod
    def of(cls, group: NDArray[np.integer[Any]], groups: int) -> Rounds:
        requests = np.bincount(group, minlength=groups)
        longest_first = np.argsort(-requests, kind="stable")
        rank = np.empty(groups, dtype=np.intp)
        rank[longest_first] = np.arange(groups)
        by_group = np.argsort(group, kind="stable")
        turn = np.empty(len(group), dtype=np.intp)  # how many requests of its group came before
        turn[by_group] = np.arange(len(group)) - np.repeat(np.cumsum(requests) - requests, requests)
        sizes = np.bincount(turn)
        return cls(longest_first, sizes.tolist(), (np.cumsum(sizes) - sizes)[turn] + rank[group])

    def ordered(self, values: Floats) -> Floats:
        """Values [T, ...] of the requests in this order."""
        moved = np.empty_like(values)
        moved[self.place] = values
        return moved


def last_per_group(before: NDArray[Any], group: NDArray[np.integer[Any]], sums: NDArray[Any]) -> NDArray[Any]:
    """Sums [G, ...] with the last of each group among `sums` [T, ...]; those of other groups as before."""
    after = before.copy()
    after[group] = sums  # of several rows of a group the last one stays
    return after


def running_sums(
    start: Floats, group: NDArray[np.integer[Any]], bets: Floats, starts: Floats | None = None
) -> Floats:
    """R_t = (R_{t-1} + w_t) e_t after each of T requests [T, W], with R_{t-1} that of its own group.

    `start` [G, W] is where the groups begin, `group` [T] whose request t is, `bets` [T, W] the e_t. `starts`
    [T] are the w_t: what is put on bets that begin at the request (1 by default).
    """
    rounds = Rounds.of(group, len(start))
    begin = np.ones(len(bets)) if starts is None else rounds.ordered(starts)
    sums = _summed(rounds, start, rounds.ordered(bets), begin, most=None)
    # Past an alarm, and while an incident is open, sums grow beyond all numbers; what becomes of them must
    # not depend on how many requests come at a time.
    if not (sums <= LARGEST_SUM).all():
        sums = _summed(rounds, start, rounds.ordered(bets), begin, most=LARGEST_SUM)
    after: Floats = sums[rounds.place]
    return after


def _summed(rounds: Rounds, start: Floats, sums: Floats, begin: Floats, *, most: float | None) -> Floats:
    """In place of `sums`, which are the bets in the order of the rounds."""
    current, done = start[rounds.longest_first], 0
    with np.errstate(over="ignore"):
        for size, alike in groupby(rounds.sizes):  # most rounds are as large as the one before
            end = done + size * sum(1 for _ in alike)
            of_rounds = sums[done:end].reshape(-1, size, sums.shape[1])
            current, begins, done = current[:size], begin[done:end].reshape(-1, size, 1), end
            for of_round, begin_now in zip(of_rounds, begins, strict=True):
                np.multiply(current + begin_now, of_round, of_round)
                if most is not None:
                    np.minimum(of_round, most, out=of_round)
                current = of_round
    return sums


@dataclass(frozen=True, slots=True, eq=False)
class Running:
    """Sums of bets, and what they know of their age."""

    evidence: Floats  # [N, W] R
    mean_start: Floats  # [N, W] on the stream's clock: its count of drafted requests

    def __getitem__(self, rows: Any) -> Running:
        return Running(self.evidence[rows], self.mean_start[rows])

    def __setitem__(self, rows: Any, sums: Running) -> None:
        self.evidence[rows], self.mean_start[rows] = sums.evidence, sums.mean_start

    def followed_by(self, sums: Running) -> Running:
        return Running(
            np.concatenate([self.evidence, sums.evidence]), np.concatenate([self.mean_start, sums.mean_start])
        )

    def last_per_group(self, group: NDArray[np.integer[Any]], sums: Running) -> Running:
        """As `last_per_group`, of both."""
        return Running(
            last_per_group(self.evidence, group, sums.evidence),
            last_per_group(self.mean_start, group, sums.mean_start),
        )


@dataclass(frozen=True, slots=True, eq=False)
class InSessions:
    """T requests: what they offer to bet on, and how much of a change they show to a bet of which age."""

    gain: Floats  # [T, W] see bets.Offers
    most: Floats  # [T, W]
    scale: Floats  # [T] the standard deviation of a session's first request in its own; 0: no evidence
    clock: Floats  # [T] the stream's
    open_for: Floats  # [T] requests of the stream since the session began
    pulled: Floats  # [T] w
    inflation: Floats  # [T] f

    def __getitem__(self, rows: Any) -> InSessions:
        return InSessions(*(getattr(self, item.name)[rows] for item in fields(self)))


def aging_sums(start: Running, group: NDArray[np.intp], requests: InSessions, starts: Floats) -> Running:
    """Each after its request [T, W], of its own group, which begins at `start` [G, W].

    `group` [T] and `starts` [T] are as in `running_sums`, all starts above 0; W is a multiple of BETS.
    """
    rounds = Rounds.of(group, len(start.evidence))
    by_age = requests.pulled / np.maximum(requests.open_for, 1.0)
    # shown = max(1 - by_age (now - mean start), 1 - w)
    columns = starts, starts * requests.clock, by_age, 1.0 - by_age * requests.clock, 1.0 - requests.pulled
    of_request = [rounds.ordered(column)[:, None] for column in (*columns, requests.inflation)]
    of_first = np.tile(STAKES, requests.gain.shape[1] // BETS) * requests.scale[:, None]
    of_first /= requests.inflation[:, None]
    of_lane = [rounds.ordered(part) for part in (of_first, requests.most, requests.gain)]
    after = Running(np.empty_like(requests.gain), np.empty_like(requests.gain))
    columns_of_all = [after.evidence, after.mean_start, *of_lane, *of_request]
    current, done = start[rounds.longest_first], 0
    sums, means = current.evidence, current.mean_start
    with np.errstate(over="ignore"):
        for size, alike in groupby(rounds.sizes):  # most rounds are as large as the one before
            end = done + size * sum(1 for _ in alike)
            parts = [column[done:end].reshape(-1, size, column.shape[1]) for column in columns_of_all]
            sums, means, done = sums[:size], means[:size], end
            for of_round in zip(*parts, strict=True):
                sums_after, means_after, first, most, gain, begin, begin_now, slope, *rest = of_round
                shown_new, least, inflation = rest
                worth = sums + begin
                np.divide(sums * means + begin_now, worth, out=means_after)
                shown = np.maximum(means_after * slope + shown_new, least)
                staked = np.minimum(first * shown, most)
                np.multiply(worth, charged(1.0 + staked * gain, staked, inflation), out=sums_after)
                # As in running_sums; the mean start is no number beyond.
                np.minimum(sums_after, LARGEST_SUM, out=sums_after)
                sums, means = sums_after, means_after
    return after[rounds.place]
