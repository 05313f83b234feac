"""Sums that run through requests one after the other, of many groups side by side.

In round n the n-th request of every group is added, so that the work of a round is shared by all groups
while each sum takes its requests in their order: bit for bit what it is for the group alone.

Where requests come in sessions, the sums know how old their bets are (`aging_sums`).
After a lasting change a request shows all of it against what the earlier requests of its session made it
expect, if those all came before the change; of the part that they pull the expectation along, w = 1 - fresh
(`expectation.py`), nothing is left to see where all came after. A bet that began at t is a bet on a change
at t. Of a session, whose requests are taken to be spread evenly over the time that it has been open, it
therefore sees

    shown = 1 - w min(1, (now - t) / open)

in units of what a first request shows, and stakes so much. One sum holds the bets of all t. What all of them
stake is what a bet of the mean age would, the mean weighted by what each is worth:

    R <- (R + w_t) e       mean start <- (R mean start + w_t now) / (R + w_t)

All of this is known before x is, so that the guarantee of `evidence.py` does not depend on it. With the bets
of every t kept apart it is no faster: in 60 runs of the sessions of tests/benchmarks/detection a drop of
.05, .10 and .20 took 535, 179 and 49 requests then and 540, 178 and 53 with one sum where sessions follow one
another, and 366, 34 and 12 against 385, 34 and 11 where 16 are open at a time.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.statistics.bets import BETS, LARGEST_SUM, STAKES, Floats


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
    sums, current, done = rounds.ordered(bets), start[rounds.longest_first], 0
    begin = np.ones(len(bets)) if starts is None else rounds.ordered(starts)
    with np.errstate(over="ignore"):
        for size in rounds.sizes:
            of_round = sums[done : done + size]
            np.multiply(current[:size] + begin[done : done + size, None], of_round, of_round)
            current, done = of_round, done + size
    # Only rows past an alarm, which are thrown away, can grow so far; they must still add up.
    after: Floats = np.minimum(sums, LARGEST_SUM, out=sums)[rounds.place]
    return after


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
    of_request = np.stack([rounds.ordered(column) for column in columns])[:, :, None]
    of_first = np.tile(STAKES, requests.gain.shape[1] // BETS) * requests.scale[:, None]
    of_lane = np.stack([rounds.ordered(part) for part in (of_first, requests.most, requests.gain)])
    current, done = start[rounds.longest_first], 0
    sums, means = current.evidence, current.mean_start
    evidence, mean_start = [sums[:0]], [means[:0]]
    with np.errstate(over="ignore", invalid="ignore"):
        for size in rounds.sizes:
            begin, begin_now, slope, shown_new, least = of_request[:, done : done + size]
            first, most, gain = of_lane[:, done : done + size]
            sums, worth = sums[:size], sums[:size] + begin
            means = (sums * means[:size] + begin_now) / worth
            shown = np.maximum(means * slope + shown_new, least)
            sums = worth + worth * (np.minimum(first * shown, most) * gain)
            evidence.append(sums)
            mean_start.append(means)
            done += size
    # As in running_sums: what is thrown away may be too large, and still has to add up.
    return Running(np.fmin(np.concatenate(evidence), LARGEST_SUM), np.concatenate(mean_start))[rounds.place]
