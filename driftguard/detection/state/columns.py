"""The observations of a batch as columns: those that hold evidence, and what is counted of all of them.

Evidence hold those with drafted tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from operator import attrgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.observations import ObservationBatch
from driftguard.detection.state.history import COLUMNS
from driftguard.detection.state.stream_state import StreamState
from driftguard.detection.statistics.sessions import Keys, OpenSessions, session_keys, sums_before

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """T observations that hold evidence: drafted > 0 at the positions that they are judged by, and no window
    after a gap. `drafted` and `accepted` are of those positions."""

    place: NDArray[np.intp]  # [T] in the batch
    ordinal: Ints
    ended_ms: Ints
    drafted: Ints
    accepted: Ints
    segment: NDArray[np.uint8]  # [T] index into the stream's segments
    stratum: NDArray[np.uint16]  # [T] index into the stream's strata
    x: Floats  # [T] accepted / drafted
    log_length: Floats  # [T] log of output_tokens; 0 where not given
    session: Keys  # [T] see sessions.py
    prompt_tokens: Ints  # [T] -1 where not given
    cached_tokens: Ints  # [T]
    effect: Floats  # [T] of all factors in use, see factors.py
    expected: Floats  # [T] see expectation.py; 0 where the stratum has no baseline yet
    margin: Floats  # [T]
    fresh: Floats  # [T]
    open_for: Floats  # [T] how many drafted requests of the stream ago the session began

    def __len__(self) -> int:
        return len(self.ordinal)

    def __getitem__(self, part: slice | NDArray[np.intp]) -> Columns:
        return Columns(*(column[part] for column in _ALL(self)))

    def ended_at(self, place: int) -> float:
        """Seconds since 1970 UTC."""
        return int(self.ended_ms[place]) / 1000.0


_ALL = attrgetter(*(item.name for item in fields(Columns)))


def columns_of(
    state: StreamState, batch: ObservationBatch, evident: NDArray[np.bool_], strata: NDArray[np.uint16]
) -> Columns:
    """The `evident` observations; `strata` [N] of the batch, all of them known to `state` (with_strata)."""
    place = np.flatnonzero(evident)
    session = session_keys([batch.session[index] for index in place.tolist()], strata[place].tolist())
    return columns_at(state, batch, place, strata[place], session)


def columns_at(
    state: StreamState,
    batch: ObservationBatch,
    place: NDArray[np.intp],
    stratum: NDArray[np.uint16],
    session: Keys,
) -> Columns:
    """The observations at these places [T]."""
    drafted, accepted = batch.judged_drafted[place], batch.judged_accepted[place]
    zero = np.zeros(len(place))
    return Columns(
        place=place,
        ordinal=batch.ordinal[place],
        ended_ms=np.rint(batch.ended_at[place] * 1000.0).astype(np.int64),
        drafted=drafted,
        accepted=accepted,
        segment=state.segment_of_stratum[stratum],
        stratum=stratum,
        x=accepted / drafted,
        log_length=np.where(windows_in(batch)[place], 0.0, np.log(np.maximum(batch.output_tokens[place], 1))),
        session=session,
        prompt_tokens=batch.prompt_tokens[place],
        cached_tokens=batch.cached_tokens[place],
        effect=zero,
        expected=zero,
        margin=zero,
        fresh=zero,
        open_for=zero,
    )


def sessions_before(table: OpenSessions, rows: Columns, clock: int) -> tuple[Floats, OpenSessions]:
    """Each row's session as it was before it [T, KNOWN], and the table after all; see `sums_before`."""
    return sums_before(table, rows.session, rows.x - rows.effect, rows.log_length, clock)


def history_rows(state: StreamState) -> Columns:
    """The state's history as columns; lengths, prompts and sessions are no longer known."""
    past = state.history
    wide = {name: past.wide(name) for name in COLUMNS}
    stratum = wide.pop("stratum").astype(np.uint16)
    return Columns(
        place=np.arange(len(past)),
        segment=state.segment_of_stratum[stratum],
        stratum=stratum,
        x=wide["accepted"] / wide["drafted"],
        log_length=np.zeros(len(past)),
        session=np.zeros(len(past), dtype=np.uint64),
        prompt_tokens=np.full(len(past), -1),
        cached_tokens=np.full(len(past), -1),
        effect=np.zeros(len(past)),
        open_for=np.zeros(len(past)),
        **wide,
    )


SECONDS_PER_DAY = 86_400.0
MOMENT_SECONDS = 1e-3  # as fine as times are kept
TOKENS_OF_A_REQUEST = 32
MOST_REQUESTS_OF_A_WINDOW = 25  # so that it takes several windows to say that drafting stopped


def windows_in(batch: ObservationBatch) -> NDArray[np.bool_]:
    if "window" not in batch.kind:  # as in nearly every batch
        return np.zeros(len(batch), dtype=np.bool_)
    return np.array([kind == "window" for kind in batch.kind], dtype=np.bool_)


@dataclass(frozen=True, slots=True)
class Counts:
    """Of one batch."""

    last_ordinal: int
    requests: int
    undrafted: int
    undrafted_at_end: int
    all_undrafted: bool
    first_ended_at: float  # earliest and latest end, seconds since 1970
    last_ended_at: float
    running_requests: int
    started_requests: int

    def after(self, before: StreamState) -> dict[str, Any]:
        """The fields of the state that follows `before` which this counts."""
        first = before.requests == 0
        return {
            "ordinal": self.last_ordinal,
            "requests": before.requests + self.requests,
            "undrafted": before.undrafted + self.undrafted,
            "undrafted_in_a_row": self.undrafted_at_end
            + (before.undrafted_in_a_row if self.all_undrafted else 0),
            "first_ended_at": self.first_ended_at
            if first
            else min(before.first_ended_at, self.first_ended_at),
            "last_ended_at": self.last_ended_at if first else max(before.last_ended_at, self.last_ended_at),
            "running_requests": before.running_requests + self.running_requests,
            "started_requests": before.started_requests + self.started_requests,
        }


def _requests_in(batch: ObservationBatch) -> Ints:
    """[N] how much an observation without a draft says about drafting: an idle window nothing, one in which
    tokens were generated as much as some requests of that many tokens."""
    tokens = np.maximum(batch.output_tokens, 0)
    of_window = np.minimum(tokens // TOKENS_OF_A_REQUEST, MOST_REQUESTS_OF_A_WINDOW)
    return np.where(windows_in(batch), of_window, 1)


def counts_of(batch: ObservationBatch, starts: Ints) -> list[Counts]:
    """Of batches that follow one another as one: each begins at its start and has an observation."""
    ends = np.append(starts[1:], len(batch))
    drafted = batch.drafted > 0
    last_drafted = np.maximum.reduceat(np.where(drafted, np.arange(len(batch)), -1), starts)
    told = (batch.concurrency >= 0) & (batch.started_requests >= 0)  # of windows only
    so_far = np.concatenate([[0], np.cumsum(~drafted * _requests_in(batch))])
    columns = (
        batch.ordinal[ends - 1],
        ends - starts,
        np.add.reduceat((~drafted).astype(np.int64), starts),
        so_far[ends] - so_far[np.maximum(last_drafted + 1, starts)],
        last_drafted < starts,
        np.minimum.reduceat(batch.ended_at, starts),
        np.maximum.reduceat(batch.ended_at, starts),
        np.add.reduceat(np.where(told, batch.concurrency, 0), starts),
        np.add.reduceat(np.where(told, batch.started_requests, 0), starts),
    )
    return [Counts(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def counted(before: StreamState, state: StreamState, batch: ObservationBatch) -> StreamState:
    """`state` with the totals of `before` and the whole batch."""
    (counts,) = counts_of(batch, np.zeros(1, dtype=np.int64))
    return replace(state, **counts.after(before))


def requests_since(state: StreamState, ordinal: int, most: int) -> int:
    """How many observations the stream has had behind this ordinal; `most` or more where that is longer ago
    than its history reaches back."""
    found = state.history.count_behind(ordinal)
    is_all = found == len(state.history) < state.history.total
    return max(found, most) if is_all else found


def requests_per_day(state: StreamState) -> float:
    """Traffic measured so far; 0 where all requests ended at one moment: within a millisecond."""
    span = state.last_ended_at - state.first_ended_at
    return state.requests / span * SECONDS_PER_DAY if span >= MOMENT_SECONDS else 0.0
