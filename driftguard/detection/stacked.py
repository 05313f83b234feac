"""States of many streams as one: their strata one after the other, their observations too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from itertools import chain
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.observations import ObservationBatch
from driftguard.detection.state.stream_state import StreamState
from driftguard.detection.statistics.hourly_profile import Rhythms
from driftguard.detection.statistics.running_sums import Running
from driftguard.detection.steps.bet_shares import watched_among
from driftguard.detection.steps.evidence import of_streams

_OF_STRATUM = (  # columns of a state over its strata that a fold of watched strata reads or writes
    "segment_of_stratum",
    "setting_of_stratum",
    "drafted_requests",
    "reference",
    "ready_ordinal",
    "joining",
    "growing",
    "cut_off",
    "stratum_evidence",
    "stratum_mean_start",
    "windows",
    "blocks",
    "open_block",
)
_WRITTEN = ("drafted_requests", "joining", "stratum_evidence", "stratum_mean_start", "open_block")


@dataclass(frozen=True, slots=True, eq=False)
class SideBySide:
    """G streams. `state` has their C strata, and of each of them nothing that is not in _OF_STRATUM or in its
    rhythms; the columns of `batch` [N] are those of their batches, one after the other."""

    state: StreamState
    first_stratum: list[int]  # [G + 1]
    stream_of_stratum: NDArray[np.intp]  # [C]
    first_segment: NDArray[np.int64]  # [G + 1]
    begun: NDArray[np.int64]  # of each stream's segments, one after the other
    evidence: Running  # [G, LANES] of each stream
    batch: ObservationBatch
    starts: NDArray[np.int64]  # [G] where each batch begins

    def own(self, together: StreamState, place: int) -> dict[str, Any]:
        """What a fold of watched strata writes, of the stream at this place: copies, which keep nothing of
        the other streams in memory."""
        strata = slice(*self.first_stratum[place : place + 2])
        return {name: getattr(together, name)[strata].copy() for name in _WRITTEN}

    @property
    def segment_of_stratum(self) -> NDArray[np.int64]:
        """[C] of the streams' segments one after the other."""
        return self.first_segment[self.stream_of_stratum] + self.state.segment_of_stratum

    @property
    def watched_segments(self) -> NDArray[np.int64]:
        """How many segments of each stream have a stratum with a baseline [G]."""
        segments = int(self.first_segment[-1])
        watched = watched_among(segments, self.segment_of_stratum, self.state.ready)
        return np.add.reduceat(watched, self.first_segment[:-1], dtype=np.int64)

    def own_rhythms(self, together: StreamState, place: int, before: Rhythms) -> Rhythms:
        strata = slice(*self.first_stratum[place : place + 2])
        return before.counted(together.rhythms.today[strata].copy(), strays=0)


def side_by_side(states: Sequence[StreamState], batches: Sequence[ObservationBatch]) -> SideBySide:
    """Of streams in which the same day is under way."""
    strata = np.array([len(state.ready_ordinal) for state in states])
    requests = np.array([len(batch) for batch in batches])
    streams = np.arange(len(states))
    columns: dict[str, Any] = {
        name: np.concatenate([getattr(state, name) for state in states]) for name in _OF_STRATUM
    }
    return SideBySide(
        state=StreamState(**columns, rhythms=_rhythms([state.rhythms for state in states])),
        first_stratum=[0, *np.cumsum(strata).tolist()],
        stream_of_stratum=np.repeat(streams, strata),
        first_segment=np.concatenate([[0], np.cumsum([len(state.names) for state in states])]),
        begun=np.concatenate([state.begun for state in states]),
        evidence=of_streams(states),
        batch=joined(batches),
        starts=np.cumsum(requests) - requests,
    )


def _rhythms(parts: Sequence[Rhythms]) -> Rhythms:
    """Without what only the end of a day asks for."""

    def column(name: str) -> NDArray[Any]:
        return np.concatenate([getattr(part, name) for part in parts])

    none, used = Rhythms.none(), column("used")
    return replace(
        none,
        day=parts[0].day,
        today=column("today"),
        used=used,
        effect=column("effect") if used.any() else none.effect,
        variance=column("variance") if used.any() else none.variance,
    )


def joined(batches: Sequence[ObservationBatch]) -> ObservationBatch:
    """One after the other. Each of them was checked; ordinals increase within each only."""
    columns: dict[str, Any] = {}
    for item in fields(ObservationBatch):
        parts = [getattr(batch, item.name) for batch in batches]
        is_array = isinstance(parts[0], np.ndarray)
        columns[item.name] = np.concatenate(parts) if is_array else list(chain.from_iterable(parts))
    return ObservationBatch.unchecked(columns)
