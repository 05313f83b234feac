"""Sums that run through requests one after the other, of many groups side by side.

In round n the n-th request of every group is added, so that the work of a round is shared by all groups
while each sum takes its requests in their order: bit for bit what it is for the group alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.statistics.bets import LARGEST_SUM, Floats


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
