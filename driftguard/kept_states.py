"""The detector states of all streams: in memory as long as there is room, and stored in parts.

Per batch a stream's head is written, and a piece of its history where one became full
(driftguard.detection.stored). What the status shows of a stream takes longer to make than folding its
records: it is made at once where something was found, and in turn, a bounded number per batch, elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import msgspec
from sqlalchemy.orm import Session

from driftguard.begun_anew import begin_anew
from driftguard.detection import DetectorConfig, Folded, StreamState, UnreadableState, describe
from driftguard.detection.stored import StoredState, from_parts, parts_of
from driftguard.incident_decisions import open_directions
from driftguard.metrics import Metrics
from driftguard.store import detector_states

STATES_IN_MEMORY = 10_000  # a state is 0.1 to 0.2 MB, and at most 1.4 MB (hundreds of configurations)
LOADED_AT_ONCE = 200
DESCRIBED_PER_BATCH = 5  # each takes some 1 to 5 ms


class KeptStates:
    """What `store` writes counts as written only when `committed` was called after the commit."""

    def __init__(self, config: DetectorConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self._states: OrderedDict[int, StreamState] = OrderedDict()
        self._stored: dict[int, range] = {}  # numbers of the pieces of each state in memory
        self._waiting: dict[int, float] = {}  # streams to describe, longest waiting first: factor of A
        self._waiting_after = self._waiting  # once what `store` wrote is committed

    def __len__(self) -> int:
        """How many are in memory."""
        return len(self._states)

    def __getitem__(self, stream_id: int) -> StreamState:
        return self._states[stream_id]

    def clear(self) -> None:
        """Nothing in memory can be trusted any more: another process folded, or a batch failed."""
        self._states.clear()
        self._stored.clear()

    def load(self, session: Session, stream_ids: Collection[int]) -> None:
        """Those that are not in memory. What cannot be read begins anew."""
        missing = [stream_id for stream_id in stream_ids if stream_id not in self._states]
        for start in range(0, len(missing), LOADED_AT_ONCE):
            ids = missing[start : start + LOADED_AT_ONCE]
            stored = detector_states.load(session, ids)
            for stream_id in ids:
                self._states[stream_id] = StreamState()
                self._stored[stream_id] = range(0)
                if stream_id in stored:
                    self._decode(session, stream_id, stored[stream_id])

    def _decode(self, session: Session, stream_id: int, stored: StoredState) -> None:
        try:
            self._states[stream_id] = from_parts(stored)
            if stored.history_rows is not None:
                self._stored[stream_id] = self._states[stream_id].history.numbers
        except UnreadableState as error:
            self._states[stream_id] = begin_anew(session, stream_id, error, self._metrics)
            detector_states.forget_history(session, stream_id)

    def store(self, session: Session, changed: Mapping[int, Folded]) -> None:
        """In the transaction of the fold, from the states in memory to `changed`."""
        now = datetime.now(UTC)
        summaries = self._summaries(session, changed)
        detector_states.store(
            session,
            [self._change(stream_id, folded, summaries) for stream_id, folded in changed.items()],
            now,
        )
        others = {stream_id: each for stream_id, each in summaries.items() if stream_id not in changed}
        detector_states.store_summaries(session, others)

    def _change(
        self, stream_id: int, folded: Folded, summaries: Mapping[int, dict[str, Any]]
    ) -> detector_states.Change:
        numbers, stored = folded.state.history.numbers, self._stored[stream_id]
        return detector_states.Change(
            stream_id,
            parts_of(folded.state, stored),
            first_stored=stored.start if stored else numbers.start,
            first_needed=numbers.start,
            summary=summaries.get(stream_id),
        )

    def committed(self, changed: Mapping[int, Folded]) -> None:
        self._waiting = self._waiting_after
        for stream_id, folded in changed.items():
            self._states[stream_id] = folded.state
            self._states.move_to_end(stream_id)
            self._stored[stream_id] = folded.state.history.numbers
        while len(self._states) > STATES_IN_MEMORY:
            dropped, _ = self._states.popitem(last=False)
            del self._stored[dropped]

    def _summaries(self, session: Session, changed: Mapping[int, Folded]) -> dict[int, dict[str, Any]]:
        """Of streams in which something was found, and of those that waited longest."""
        waiting = {**self._waiting, **{stream_id: folded.factor for stream_id, folded in changed.items()}}
        at_once = [stream_id for stream_id, folded in changed.items() if self._tells(stream_id, folded)]
        due = dict.fromkeys([*at_once, *islice(waiting, DESCRIBED_PER_BATCH)])
        self.load(session, due)
        self._waiting_after = {stream_id: each for stream_id, each in waiting.items() if stream_id not in due}
        return {
            stream_id: self._summary(
                changed[stream_id].state if stream_id in changed else self._states[stream_id],
                waiting[stream_id],
            )
            for stream_id in due
        }

    def _tells(self, stream_id: int, folded: Folded) -> bool:
        """Is what the status shows of the stream no longer true, and not just a little old?"""
        before = self._states[stream_id]
        changed = open_directions(before) != open_directions(folded.state)
        return bool(folded.findings) or changed or before.requests == 0

    def _summary(self, state: StreamState, factor: float) -> dict[str, Any]:
        summary = describe(self._config.times(factor), state)
        own = self._config.threshold(summary.requests_per_day)  # what is promised of it, whatever the others
        described: dict[str, Any] = msgspec.to_builtins(replace(summary, false_alarm_every=own))
        return described
