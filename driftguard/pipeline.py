"""From stored records to incidents: read, fold, decide, store; all in one transaction per batch.

    records behind the position -> fold per stream -> findings -> incidents, transitions, notifications
                                        |
                                        +-> detector states and the new position

What is committed is exactly what folding every record once, in seq order, gives: a process that dies at any
moment leaves either all of a batch or nothing of it. Processes that share a database take turns. Of the
scope "fleet" the second half holds, not the first: which streams are in service, and which are named
together, is judged at the end of each batch, so where the batches end has a say.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog
from sqlalchemy.orm import Session

from driftguard import fleet, incident_closing, incident_decisions, incident_opening
from driftguard.detection import (
    BaselineReady,
    BaselineSettled,
    DetectorConfig,
    DriftClosed,
    DriftOpened,
    Finding,
    Folded,
    ObservationBatch,
    RhythmLearned,
    StreamState,
    fold_fleet,
    fold_many,
)
from driftguard.errors import DatabaseUnavailable
from driftguard.incidents import PAGE_SLOWDOWN
from driftguard.kept_states import KeptStates
from driftguard.metrics import Metrics
from driftguard.positions import first_position
from driftguard.records import StreamKey
from driftguard.settings import FalseAlarmScope
from driftguard.store import detector_states, incidents, streams
from driftguard.store.database import Database
from driftguard.store.records import StoredRecord, read_after
from driftguard.store.tables import Stream
from driftguard.store.work import FOLD

BATCH_RECORDS = 5_000
# A larger batch for many streams: what a batch costs per stream is shared by its records.
RECORDS_PER_STREAM = 5
IDLE_SECONDS = 1.0  # longest time between two looks, woken or not
PAUSE_SECONDS = 0.5  # shortest, unless a batch was full: bounds how often a state is written
MAX_BACKOFF_SECONDS = 10.0

_PAGING = (DriftOpened, DriftClosed)
AfterFold = Callable[[Session, Stream, Sequence[StoredRecord], Sequence[Finding]], None]
log = structlog.get_logger(__name__)


@dataclass(slots=True)
class _Counts:
    records: int = 0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0


class Pipeline:
    """The detector loop. `after_fold` callables run inside the transaction, once per stream and batch,
    with the stream's records (probes too) and findings; what they raise rolls the batch back. `scope`: what
    A of the config is for, each stream or all of them together. `page_slowdown`: see driftguard.incidents.
    `on_found`: called after a commit in which an incident opened or ended."""

    def __init__(
        self,
        database: Database,
        config: DetectorConfig,
        metrics: Metrics,
        *,
        scope: FalseAlarmScope = "stream",
        destinations: Sequence[str] = (),
        page_slowdown: float = PAGE_SLOWDOWN,
        after_fold: Sequence[AfterFold] = (),
        on_found: Callable[[], None] = lambda: None,
        batch_records: int = BATCH_RECORDS,
    ) -> None:
        self._database = database
        self._config = config
        self._scope = scope
        self._metrics = metrics
        self._destinations = tuple(destinations)
        self._page_slowdown = page_slowdown
        self._after_fold = tuple(after_fold)
        self._on_found = on_found
        self._batch_records = batch_records
        self._states = KeptStates(config, metrics)
        self._position = -1  # of the states in memory
        self._wake = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="detector", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Ends the thread after the batch at hand."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join()

    def wake(self) -> None:
        """There are new records. Called from the ingest thread after a commit; returns at once."""
        self._wake.set()

    def _run(self) -> None:
        failures = 0
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                folded = self.fold_batch()
            except Exception as error:  # noqa: BLE001 (the loop outlives any failure; nothing was committed)
                failures += 1
                self._report(error)
                self._stopping.wait(min(0.5 * 2.0 ** min(failures, 6), MAX_BACKOFF_SECONDS))
                continue
            failures = 0
            self._metrics.database_up.set(1)
            if folded < self._batch_records:
                self._stopping.wait(PAUSE_SECONDS)
                self._wake.wait(IDLE_SECONDS)

    def _report(self, error: Exception) -> None:
        self._states.clear()
        self._metrics.fold_failures.inc()
        if isinstance(error, DatabaseUnavailable):
            self._metrics.database_up.set(0)
            log.warning("the fold waits for the database", error=str(error))
        else:
            log.exception("the fold failed and will be tried again", position=self._position)

    def fold_batch(self) -> int:
        """Folds the next records, at most one batch. Returns how many; 0 means that all are folded."""
        with self._database.session(FOLD) as session:
            detector_states.lock_fold(session)
            position = detector_states.position(session)
            if position != self._position:  # the first batch of this process, or another process folded
                self._states.clear()
                self._position = position
            limit = max(self._batch_records, RECORDS_PER_STREAM * len(self._states))
            records = read_after(session, position, limit=limit)
            known: dict[int, Stream] = {}
            changed: dict[int, Folded] = {}
            if records:
                concerned = {record.stream_id for record in records}
                known = {stream.id: stream for stream in streams.streams_of(session, concerned)}
                changed = self._fold_streams(session, records, known)
                position = records[-1].seq
                detector_states.set_position(session, position)
            self._states.store(session, changed)
        self._states.committed(changed)
        self._position = position
        if any(isinstance(finding, _PAGING) for folded in changed.values() for finding in folded.findings):
            self._on_found()
        self._count(records, known)
        self._metrics.detector_last_round.set_to_current_time()
        return len(records)

    def _fold_streams(
        self, session: Session, records: Sequence[StoredRecord], known: Mapping[int, Stream]
    ) -> dict[int, Folded]:
        by_stream: dict[int, list[StoredRecord]] = defaultdict(list)
        for record in records:
            by_stream[record.stream_id].append(record)
        self._states.load(session, by_stream)
        states = {
            stream_id: incident_decisions.applied(session, stream_id, self._states[stream_id])
            for stream_id in sorted(by_stream)
        }
        changed = self._folded(session, states, records)
        for stream_id, folded in changed.items():
            stream = known[stream_id]
            for finding in folded.findings:
                self._apply(session, stream, finding, folded.factor)
            for hook in self._after_fold:
                hook(session, stream, by_stream[stream_id], folded.findings)
        return changed

    def _folded(
        self,
        session: Session,
        states: Mapping[int, StreamState],
        records: Sequence[StoredRecord],
    ) -> dict[int, Folded]:
        traffic = [record for record in records if record.kind != "probe"]  # canary probes are no traffic
        by_stream = _observations(traffic).parted([record.stream_id for record in traffic])
        none = _observations([])
        batches = {stream_id: by_stream.get(stream_id, none) for stream_id in states}
        if self._scope == "fleet":
            others = fleet.gather(session, streams.all_streams(session))
            return fold_fleet(self._config, others, states, batches)
        folded = fold_many(self._config, list(states.values()), list(batches.values()))
        return {stream_id: Folded(*each, 1.0) for stream_id, each in zip(states, folded, strict=True)}

    def _apply(self, session: Session, stream: Stream, finding: Finding, factor: float) -> None:
        now = datetime.now(UTC)
        if isinstance(finding, DriftOpened):
            incident_opening.open_from(
                session, stream, finding, self._destinations, now, factor, self._page_slowdown
            )
        elif isinstance(finding, DriftClosed):
            for incident in incidents.unresolved_of(session, stream.id, finding.direction):
                incidents.move(
                    session, incident.id, "resolved", incident_closing.closing_reason(finding), now
                )
        else:
            _log_learned(stream, finding)

    def _count(self, records: Sequence[StoredRecord], known: Mapping[int, Stream]) -> None:
        totals: dict[tuple[int, str, str], _Counts] = defaultdict(_Counts)
        for record in records:
            counts = totals[record.stream_id, record.segment, record.kind]
            counts.records += 1
            counts.steps += record.steps
            counts.drafted += record.drafted
            counts.accepted += record.accepted
            counts.emitted += record.emitted
        for (stream_id, segment, kind), counts in totals.items():
            self._metrics.count_traffic(stream_key(known[stream_id]), segment, kind, counts)


def _log_learned(stream: Stream, finding: RhythmLearned | BaselineSettled | BaselineReady) -> None:
    of_stratum = log.bind(stream=stream.id, segment=finding.segment, stratum=finding.stratum)
    if isinstance(finding, RhythmLearned):
        of_stratum.info("daily rhythm learned", days=finding.days, amplitude=finding.amplitude)
    elif isinstance(finding, BaselineSettled):
        of_stratum.info("baseline settled", requests=finding.requests)
    else:
        of_stratum.info("baseline ready", requests=finding.requests, reason=finding.reason)


def stream_key(stream: Stream) -> StreamKey:
    return StreamKey(stream.server, stream.target, stream.draft_version, stream.method)


def _observations(traffic: Sequence[StoredRecord]) -> ObservationBatch:
    return ObservationBatch.of(
        [record.seq for record in traffic],
        [record.segment for record in traffic],
        [record.drafted for record in traffic],
        [record.accepted for record in traffic],
        [record.ended_at.timestamp() for record in traffic],
        session=[record.session for record in traffic],
        kind=[record.kind for record in traffic],
        num_speculative_tokens=[record.num_speculative_tokens for record in traffic],
        acceptance_rule=[record.acceptance_rule for record in traffic],
        temperature=[record.temperature for record in traffic],
        output_tokens=[record.output_tokens for record in traffic],
        started_at=[record.started_at.timestamp() for record in traffic],
        first_position=[
            first_position(
                record.kind, record.num_speculative_tokens, record.first_drafted, record.first_accepted
            )
            for record in traffic
        ],
    )
