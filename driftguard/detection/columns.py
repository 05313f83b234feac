"""The observations of a batch that hold evidence: those with drafted tokens, as columns."""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.observations import ObservationBatch
from driftguard.detection.state import History, StreamState
from driftguard.records import OTHER_SEGMENT

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """T observations with drafted > 0."""

    place: NDArray[np.intp]  # [T] in the batch
    ordinal: Ints
    ended_ms: Ints
    drafted: Ints
    accepted: Ints
    segment: NDArray[np.uint8]  # [T] index into the stream's segments
    x: NDArray[np.float64]  # [T] accepted / drafted

    def __len__(self) -> int:
        return len(self.ordinal)

    def __getitem__(self, part: slice | NDArray[np.intp]) -> Columns:
        return Columns(*(getattr(self, item.name)[part] for item in fields(self)))

    def ended_at(self, place: int) -> float:
        """Seconds since 1970 UTC."""
        return int(self.ended_ms[place]) / 1000.0


def columns_of(state: StreamState, batch: ObservationBatch) -> Columns:
    """`state` knows every segment of the batch already (with_segments)."""
    index = {name: number for number, name in enumerate(state.names)}
    other = index.get(OTHER_SEGMENT, 0)  # only reached when 'other' is there
    segment = np.array([index.get(name, other) for name in batch.segment], dtype=np.uint8)
    place = np.flatnonzero(batch.drafted > 0)
    drafted, accepted = batch.drafted[place], batch.accepted[place]
    ended_ms = np.rint(batch.ended_at[place] * 1000.0).astype(np.int64)
    return Columns(
        place, batch.ordinal[place], ended_ms, drafted, accepted, segment[place], accepted / drafted
    )


def remember(history: History, rows: Columns, limit: int) -> History:
    """The history with these rows at its end, and no more than `limit` in all."""
    names = [item.name for item in fields(History)]
    return History(
        *(np.concatenate([getattr(history, name), getattr(rows, name)])[-limit:] for name in names)
    )
