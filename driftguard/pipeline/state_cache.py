"""The detector states of all streams: in memory as long as there is room, and stored in parts.

Per batch a stream's head is written, and a piece of its history where one became full
(driftguard.detection.state.codec). What the status shows of a stream takes longer to make than folding its
records: it is made at once where something was found, and in turn, a bounded number per batch, elsewhere.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from datetime import UTC, datetime
from itertools import islice
from typing import Any

import msgspec
from sqlalchemy.orm import Session

from driftguard.detection import DetectorConfig, Folded, StreamState, UnreadableState, describe
from driftguard.detection.state.codec import StoredState, from_parts, parts_of
from driftguard.metrics import Metrics
from driftguard.pipeline.relearning import begin_anew
from driftguard.store import folding
from driftguard.store.folding import Progress

STATES_IN_MEMORY = 10_000  # a state is 0.1 to 0.2 MB, and at most 1.4 MB (hundreds of configurations)
LOADED_AT_ONCE = 200
DESCRIBED_PER_BATCH = 5  # each takes some 1 to 5 ms


class StateCache:
    """What `store` writes counts as written only when `committed` was called after the commit."""

    def __init__(self, config: DetectorConfig, metrics: Metrics) -> None:
        self._config = config
        self._metrics = metrics
        self._progress: Progress | None = None  # of the states in memory
        self._states: OrderedDict[int, StreamState] = OrderedDict()
        self._stored: dict[int, range] = {}  # numbers of the pieces of each state in memory
        self._begun_anew: set[int] = set()  # in the transaction that is open
        self._waiting: dict[int, float] = {}  # streams to describe, longest waiting first: factor of A

    def __len__(self) -> int:
        """How many are in memory."""
        return len(self._states)

    @property
    def undescribed(self) -> int:
        """Streams whose status shows what was true before the last fold of this process."""
        return len(self._waiting)

    def __getitem__(self, stream_id: int) -> StreamState:
        return self._states[stream_id]

    def follow(self, session: Session, progress: Progress) -> None:
        """Forgets the states that another process wrote since; `progress` is what the database shows."""
        known = self._progress
        if known is None or progress.folds < known.folds:
            self.clear()
        elif progress.folds > known.folds:
            self.forget(folding.written_since(session, known.folds))
        elif progress.seq != known.seq:  # written by a version that does not count its folds
            self.clear()
        self._progress = progress

    def clear(self) -> None:
        """Nothing in memory can be trusted any more."""
        self._states.clear()
        self._stored.clear()
        self._progress = None

    def forget(self, stream_ids: Collection[int]) -> None:
        """Their states are read again where they are needed, and not described by this process."""
        for stream_id in stream_ids:
            self._states.pop(stream_id, None)
            self._stored.pop(stream_id, None)
            self._waiting.pop(stream_id, None)

    def rolled_back(self) -> None:
        """Of what is in memory only the beginnings of this transaction were not stored before it."""
        self.forget(self._begun_anew)
        self._begun_anew.clear()

    def load(
        self,
        session: Session,
        stream_ids: Collection[int],
        failure_of: Callable[[int], AbstractContextManager[None]],
    ) -> None:
        """Those that are not in memory. What cannot be read begins anew. `failure_of`: keeps what a stream
        raises."""
        missing = [stream_id for stream_id in stream_ids if stream_id not in self._states]
        for start in range(0, len(missing), LOADED_AT_ONCE):
            ids = missing[start : start + LOADED_AT_ONCE]
            stored = folding.load(session, ids)
            for stream_id in ids:
                with failure_of(stream_id):
                    self._load(session, stream_id, stored.get(stream_id))

    def _load(self, session: Session, stream_id: int, stored: StoredState | None) -> None:
        known = range(0)
        try:
            state = from_parts(stored) if stored else StreamState()
            if stored and stored.history_rows is not None:
                known = state.history.numbers
        except UnreadableState as error:
            with session.begin_nested():
                state = begin_anew(session, stream_id, error, self._metrics)
                folding.forget_history(session, stream_id)
            self._begun_anew.add(stream_id)
        self._states[stream_id], self._stored[stream_id] = state, known

    def due(self, changed: Mapping[int, Folded], wanted: Collection[int] = ()) -> dict[int, float]:
        """Which streams to describe in this batch, and with which factor: `wanted`, those in which something
        was found, and some of those that waited longest."""
        waiting = {**self._waiting, **{stream_id: folded.factor for stream_id, folded in changed.items()}}
        at_once = [stream_id for stream_id, folded in changed.items() if self._tells(stream_id, folded)]
        wanted = [stream_id for stream_id in wanted if stream_id in waiting]
        chosen = dict.fromkeys([*wanted, *at_once, *islice(waiting, DESCRIBED_PER_BATCH)])
        return {stream_id: waiting[stream_id] for stream_id in chosen}

    def store(
        self, session: Session, changed: Mapping[int, Folded], described: Mapping[int, float], fold: int
    ) -> None:
        """From the states in memory to `changed`; `fold`: the number of this one."""
        changes = [
            self._change(stream_id, folded, described.get(stream_id)) for stream_id, folded in changed.items()
        ]
        folding.store(session, changes, fold, datetime.now(UTC))

    def describe(self, session: Session, stream_ids: Sequence[int], described: Mapping[int, float]) -> None:
        """Of streams that stay as they are."""
        shown = {
            stream_id: self._summary(self._states[stream_id], described[stream_id])
            for stream_id in stream_ids
        }
        folding.store_summaries(session, shown)

    def _change(self, stream_id: int, folded: Folded, described: float | None) -> folding.Change:
        numbers, stored = folded.state.history.numbers, self._stored[stream_id]
        return folding.Change(
            stream_id,
            parts_of(folded.state, stored),
            first_stored=stored.start if stored else numbers.start,
            first_needed=numbers.start,
            summary=None if described is None else self._summary(folded.state, described),
            is_first=self._states[stream_id].requests == 0,
        )

    def committed(
        self,
        progress: Progress,
        changed: Mapping[int, Folded],
        described: Collection[int],
        failed: Collection[int],
    ) -> None:
        self._progress = progress
        self._begun_anew.clear()
        waiting = {**self._waiting, **{stream_id: folded.factor for stream_id, folded in changed.items()}}
        self._waiting = {each: factor for each, factor in waiting.items() if each not in described}
        for stream_id, folded in changed.items():
            self._states[stream_id] = folded.state
            self._states.move_to_end(stream_id)
            self._stored[stream_id] = folded.state.history.numbers
        self.forget(failed)
        while len(self._states) > STATES_IN_MEMORY:
            dropped, _ = self._states.popitem(last=False)
            del self._stored[dropped]

    def _tells(self, stream_id: int, folded: Folded) -> bool:
        """Is what the status shows of the stream no longer true, and not just a little old?"""
        before = self._states[stream_id]
        changed = [*map(bool, before.incidents)] != [*map(bool, folded.state.incidents)]  # by direction
        return bool(folded.findings) or changed or before.requests == 0

    def _summary(self, state: StreamState, factor: float) -> dict[str, Any]:
        described: dict[str, Any] = msgspec.to_builtins(describe(self._config, state, factor))
        return described
