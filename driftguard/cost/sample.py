"""Timed requests as columns, and the spread of what is computed from them."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
_Group = tuple[str, int] | None  # segment and K; None: all the small ones

BLOCKS: Final = 20
UNKNOWN_BAND: Final = -1
LEAST_REQUESTS: Final = 10  # below, nothing is said
LEVEL: Final = 0.95
SHORTEST: Final = 1e-9  # seconds per token; a time beyond these two was not measured
LONGEST: Final = 1e4


class TimedRequest(NamedTuple):
    """What a stored record tells about speed."""

    ended_at: float  # seconds since 1970 UTC
    segment: str
    num_speculative_tokens: int | None
    concurrency: int | None
    steps: int
    drafted: int
    accepted: int
    emitted: int
    accepted_per_position: Sequence[int] | None
    output_tokens: int | None
    time_per_output_token_seconds: float | None
    by_first: bool = False  # judged by its first position, because K varied: see driftguard.records.positions


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """N requests whose decoding was timed, oldest first; P drafted positions.

    `seconds` is what passed between the first output token and the last, `timed_steps` how many steps
    lie in that time. A server whose first token comes from reading the prompt emits output_tokens - 1
    in its steps, and all of them are timed; where the steps emitted every output token, the first step
    ended as the clock started. Where output_tokens is not told, all tokens are taken to be timed.
    """

    seconds_per_token: Floats  # [N]
    seconds: Floats  # [N]
    timed_steps: Floats  # [N], at least 1
    k: Ints  # [N] as configured, else drafted / steps rounded; 0 where nothing was drafted
    steps: Floats  # [N]
    drafted: Floats  # [N]
    accepted: Floats  # [N]
    emitted: Floats  # [N]
    positions: Floats  # [N, P] steps that accepted position i; NaN where the record does not tell
    band: Ints  # [N] of the concurrency: 1, 2, 3 to 4, 5 to 8, ... as 0, 1, 2, 3, ...; or UNKNOWN_BAND
    segment: NDArray[np.str_]  # [N]

    def __len__(self) -> int:
        return len(self.k)

    def __getitem__(self, chosen: Mask | slice) -> Sample:
        return Sample(*(getattr(self, field.name)[chosen] for field in fields(self)))


def sample_of(requests: Sequence[TimedRequest]) -> Sample:
    """Left out are requests without a time, with an absurd one, and of a single token."""
    timed = [(item, *_timed(item)) for item in sorted(requests, key=lambda item: item.ended_at)]
    kept = [(item, seconds, steps) for item, seconds, steps in timed if seconds > 0.0 and steps >= 1.0]
    items = [item for item, _, _ in kept]

    def column(name: str) -> Floats:
        return np.array([getattr(item, name) for item in items], dtype=np.float64)

    return Sample(
        seconds_per_token=column("time_per_output_token_seconds"),
        seconds=np.array([seconds for _, seconds, _ in kept], dtype=np.float64),
        timed_steps=np.array([steps for _, _, steps in kept], dtype=np.float64),
        k=np.array([k_of(item) for item in items], dtype=np.int64),
        steps=column("steps"),
        drafted=column("drafted"),
        accepted=column("accepted"),
        emitted=column("emitted"),
        positions=_positions(items),
        band=np.array([_band(item.concurrency) for item in items], dtype=np.int64),
        segment=np.array([item.segment for item in items], dtype=np.str_),
    )


def measured(requests: Sequence[TimedRequest]) -> list[TimedRequest]:
    """Those of the segments and K whose times vary, in their order; groups of fewer than LEAST_REQUESTS are
    judged together. One side of a change at a time: a constant may be set anew.

    A time that never varies was filled in, by a configuration or an estimate, and says of every change that
    it cost nothing. A clock that is read for each request never gives the same time ten times in a row,
    unless it is rounded so coarsely that it tells nothing about a loss either.
    """
    sizes = Counter((item.segment, k_of(item)) for item in requests)

    def group_of(item: TimedRequest) -> _Group:
        own = item.segment, k_of(item)
        return own if sizes[own] >= LEAST_REQUESTS else None

    times: dict[_Group, set[float | None]] = defaultdict(set)
    for item in requests:
        times[group_of(item)].add(item.time_per_output_token_seconds)
    return [item for item in requests if len(times[group_of(item)] - {None}) > 1]


def _timed(request: TimedRequest) -> tuple[float, float]:
    """(seconds, steps) between the first output token and the last; (0, 0) where not known, or absurd."""
    per_token = request.time_per_output_token_seconds
    if per_token is None or not SHORTEST <= per_token <= LONGEST:
        return 0.0, 0.0
    told = request.output_tokens is not None
    tokens = request.output_tokens - 1 if request.output_tokens is not None else request.emitted
    if request.drafted == 0:
        return per_token * tokens, float(tokens)  # one token per step
    first_step_untimed = told and request.emitted > tokens
    return per_token * tokens, float(request.steps - first_step_untimed)


def k_of(request: TimedRequest) -> int:
    """As configured, else drafted / steps rounded; 0 where nothing was drafted."""
    if request.drafted == 0 or request.steps == 0:
        return 0
    if request.num_speculative_tokens:
        return request.num_speculative_tokens
    return max(1, round(request.drafted / request.steps))


def _band(concurrency: int | None) -> int:
    return UNKNOWN_BAND if concurrency is None else max(concurrency - 1, 0).bit_length()


def _positions(requests: Sequence[TimedRequest]) -> Floats:
    width = max((len(item.accepted_per_position or ()) for item in requests), default=0)
    found = np.full((len(requests), width), np.nan)
    for row, item in zip(found, requests, strict=True):
        if item.accepted_per_position is not None:
            row[:] = 0.0
            row[: len(item.accepted_per_position)] = item.accepted_per_position
    return found


def runs(labels: Ints) -> Ints:
    """[N] A block for each request: the requests of one label, in order, cut into BLOCKS equal runs.

    Requests that run at the same time share the machine's state, so they are not independent; runs of
    them nearly are, as long as a run is longer than the machine's moods.
    """
    blocks = np.zeros(len(labels), dtype=np.int64)
    for number, label in enumerate(np.unique(labels)):
        places = np.flatnonzero(labels == label)
        count = min(BLOCKS, len(places))
        blocks[places] = number * BLOCKS + np.arange(len(places)) * count // len(places)
    return blocks


def one_label(count: int) -> Ints:
    return np.zeros(count, dtype=np.int64)


def variance(influence: Floats, blocks: Ints) -> float:
    """Of a statistic whose linear part is the sum of `influence` [N]: blocks count as independent."""
    names, places = np.unique(blocks, return_inverse=True)
    sums = np.bincount(places, weights=influence, minlength=len(names))
    return float((sums**2).sum()) * len(names) / (len(names) - 1)


def student(degrees: int, level: float) -> float:
    """Two-sided quantile of Student's t."""
    from scipy.special import stdtrit

    return float(stdtrit(degrees, 0.5 + level / 2.0))
