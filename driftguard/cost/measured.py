"""Which times were measured: one that never varies was filled in, by a configuration or an estimate.

Such a time says of every change that it cost nothing. A clock that is read for each request never gives the
same time ten times in a row, unless it is rounded so coarsely that it tells nothing about a loss either.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from driftguard.cost.sample import LEAST_REQUESTS, TimedRequest, k_of

_Group = tuple[str, int] | None


def measured(requests: Sequence[TimedRequest]) -> list[TimedRequest]:
    """Those of the segments and K whose times vary, in their order; groups of fewer than LEAST_REQUESTS are
    judged together. One side of a change at a time: a constant may be set anew."""
    sizes = Counter((item.segment, k_of(item)) for item in requests)

    def group_of(item: TimedRequest) -> _Group:
        own = item.segment, k_of(item)
        return own if sizes[own] >= LEAST_REQUESTS else None

    times: dict[_Group, set[float | None]] = defaultdict(set)
    for item in requests:
        times[group_of(item)].add(item.time_per_output_token_seconds)
    return [item for item in requests if len(times[group_of(item)] - {None}) > 1]
