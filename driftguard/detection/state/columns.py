"""The observations of a batch that hold evidence, as columns: those with drafted tokens."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.observations import ObservationBatch
from driftguard.detection.state.history import COLUMNS
from driftguard.detection.state.stream_state import StreamState
from driftguard.detection.statistics.sessions import Keys, session_keys

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

MILLISECONDS_PER_HOUR = 3_600_000
MILLISECONDS_PER_DAY = 86_400_000


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
    rhythm: Floats  # [T] effect of the hour of day, see hourly_profile.py; 0 where none is used
    expected: Floats  # [T] see expectation.py; 0 where the stratum has no baseline yet
    margin: Floats  # [T]
    fresh: Floats  # [T]
    open_for: Floats  # [T] how many drafted requests of the stream ago the session began

    def __len__(self) -> int:
        return len(self.ordinal)

    def __getitem__(self, part: slice | NDArray[np.intp]) -> Columns:
        return Columns(*(getattr(self, item.name)[part] for item in fields(self)))

    @property
    def day(self) -> Ints:
        """Days since 1970 UTC [T]."""
        return self.ended_ms // MILLISECONDS_PER_DAY

    @property
    def hour(self) -> Ints:
        """Of the day, UTC [T]."""
        return self.ended_ms % MILLISECONDS_PER_DAY // MILLISECONDS_PER_HOUR

    def ended_at(self, place: int) -> float:
        """Seconds since 1970 UTC."""
        return int(self.ended_ms[place]) / 1000.0


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
        log_length=np.log(np.maximum(batch.output_tokens[place], 1)),
        session=session,
        rhythm=zero,
        expected=zero,
        margin=zero,
        fresh=zero,
        open_for=zero,
    )


def history_rows(state: StreamState) -> Columns:
    """The state's history as columns; lengths and sessions are no longer known."""
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
        rhythm=np.zeros(len(past)),
        open_for=np.zeros(len(past)),
        **wide,
    )
