"""From stored records to incidents: read, fold, decide, store, all in one transaction per batch; hand on.

    records behind the position -> fold per stream -> findings -> incidents, transitions, notifications
                                        |
                                        +-> detector states and the new position

What is committed is exactly what folding every record once, in seq order, gives: a process that dies at any
moment leaves either all of a batch or nothing of it. A stream that raises is held (`held.py`), with a
position of its own, and the others go on. Of processes that share a database one folds as long as it gets
on: who comes after another has to read all the states that it wrote. Of the scope "fleet" the second half
holds, not the first: which streams are in service, and which are named together, is judged at the end of each
batch, so where the batches end has a say.
"""

from __future__ import annotations

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from uuid import UUID, uuid4

import structlog
from sqlalchemy.orm import Session

from driftguard.detection import DetectorConfig, DriftClosed, DriftOpened
from driftguard.errors import DatabaseUnavailable
from driftguard.metrics import Metrics
from driftguard.pipeline import batch_fold, held
from driftguard.pipeline.batch_fold import AfterFold, Outcome, Rules, counted
from driftguard.pipeline.state_cache import StateCache
from driftguard.records import StreamKey
from driftguard.settings import FalseAlarmScope
from driftguard.status.fold_watch import FoldWatch
from driftguard.store import folding, streams
from driftguard.store.advisory_locks import Transaction
from driftguard.store.database import CHECK, FOLD, Database, DatabaseTimeout, is_outage
from driftguard.store.folding import Progress, StoredRecord, read_after, read_of_stream
from driftguard.store.tables import HeldStream, Stream

BATCH_RECORDS = 5_000
# A larger batch for many streams: what a batch costs per stream is shared by its records.
RECORDS_PER_STREAM = 5
LEAST_SHARE = 1 / 256
GROWTH = 1.1  # of the share with each batch that was in time
TRIED_AT_ONCE = 20  # held streams, one batch of each between two batches of all
IDLE_SECONDS = 1.0  # longest time between two looks, woken or not
PAUSE_SECONDS = 0.5  # shortest, unless a batch was full: bounds how often a state is written
MAX_BACKOFF_SECONDS = 10.0
TAKE_OVER_SECONDS = 3.0  # longer than the longest time between two looks
PROCESS_ID = uuid4()

_PAGING = (DriftOpened, DriftClosed)
log = structlog.get_logger(__name__)


class Pipeline:
    """The detector loop. `scope` and `after_fold`: see driftguard.pipeline.batch_fold; what an `after_fold`
    raises rolls back what the batch had of its stream. `on_found`: called after a commit in which an
    incident opened or ended. One of another `process_id` than the fold before takes over once it has seen
    work wait at one position for `take_over_seconds`, by `watch`."""

    def __init__(
        self,
        database: Database,
        config: DetectorConfig,
        metrics: Metrics,
        *,
        scope: FalseAlarmScope = "stream",
        after_fold: Sequence[AfterFold] = (),
        on_found: Callable[[], None] = lambda: None,
        batch_records: int = BATCH_RECORDS,
        process_id: UUID = PROCESS_ID,
        take_over_seconds: float = TAKE_OVER_SECONDS,
        watch: FoldWatch | None = None,
    ) -> None:
        self._database = database
        self._metrics = metrics
        self._rules = Rules(config, scope, tuple(after_fold))
        self._on_found = on_found
        self._batch_records = batch_records
        self._process_id = process_id
        self._take_over_seconds = take_over_seconds
        self._watch = watch or FoldWatch()
        self._transaction = Transaction()  # of the last fold
        self._share = 1.0  # of a batch: less after one that the database took too long for
        self._states = StateCache(config, metrics)
        self._tried: set[int] = set()  # streams that another version had set aside
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
            limit = self._limit()
            try:
                folded = self.fold_batch()
            except Exception as error:  # noqa: BLE001 (the loop outlives any failure; nothing was committed)
                failures += 1
                self._report(error)
                self._stopping.wait(min(0.5 * 2.0 ** min(failures, 6), MAX_BACKOFF_SECONDS))
                continue
            failures = 0
            self._metrics.database.worked()
            if folded < limit:
                self._stopping.wait(PAUSE_SECONDS)
                self._wake.wait(IDLE_SECONDS)
        if not failures:
            self._hand_over()

    def _hand_over(self) -> None:
        """So that another process goes on at once; where that fails, it takes over as from one that died."""
        try:
            with self._database.session(CHECK) as session:
                folding.hand_over(session, self._process_id)
        except DatabaseUnavailable as error:
            log.info("another sidecar will have to take the fold over", error=str(error))

    def _report(self, error: Exception) -> None:
        # Not an outage, which driftguard_database_up tells: its failures would be alerted on after it.
        if not is_outage(error):
            self._metrics.fold.failures.inc()
        if isinstance(error, DatabaseTimeout):
            self._take_less()
        if isinstance(error, DatabaseUnavailable):
            self._states.rolled_back()
            self._metrics.database.up.set(0)
            log.warning("the fold waits for the database", error=str(error))
        else:
            self._states.clear()
            log.exception("the fold failed and will be tried again")

    def _take_less(self) -> None:
        self._share = max(LEAST_SHARE, self._share / 2)
        log.warning("fold batches become smaller", share=self._share)

    def fold_batch(self) -> int:
        """Folds the next records, at most one batch, and tries the held streams that are due. Returns how
        many records were read; 0 means that all were, but for those of streams that are held, or that
        another process folds."""
        count, due = self._fold_next()
        for stream_id in due[:TRIED_AT_ONCE]:
            count += self._try_again(stream_id)
        self._metrics.fold.last_round.set_to_current_time()
        return count

    def _fold_next(self) -> tuple[int, list[int]]:
        """(how many records, the held streams that are due)"""
        with self._database.session(FOLD) as session:
            before = self._begin(session)
            if before is None:
                return 0, []
            records = read_after(session, before.seq, limit=self._limit())
            waiting = folding.all_held(session)
            self._states.forget([each.stream_id for each in waiting])
            passed = Counter(record.stream_id for record in records)
            by_stream = _by_stream(records, {each.stream_id for each in waiting})
            known = {stream.id: stream for stream in folding.streams_of(session, by_stream)}
            last = records[-1].seq if records else before.seq
            after = Progress(last, before.folds + 1, self._process_id)
            outcome = batch_fold.fold_batch(
                session, self._rules, self._states, by_stream, known, fold=after.folds
            )
            now = datetime.now(UTC)
            if waiting:
                folding.add_behind(session, {each.stream_id: passed[each.stream_id] for each in waiting})
            if outcome.failures:
                held.hold(session, outcome.failures, passed, before.seq, now, self._metrics)
            after = self._end(session, before, after, outcome)
        self._hand_on(after, outcome, by_stream, known)
        if outcome.failures.was_late:
            self._take_less()
        else:
            self._share = min(1.0, self._share * GROWTH)
        return len(records), [each.stream_id for each in waiting if held.is_due(each, now, self._tried)]

    def _limit(self) -> int:
        """Records of the next batch."""
        whole = max(self._batch_records, RECORDS_PER_STREAM * len(self._states))
        return max(1, int(whole * self._share))

    def _try_again(self, stream_id: int) -> int:
        """One batch of a held stream: those of its records that the others are past. Returns how many."""
        with self._database.session(FOLD) as session:
            before = self._begin(session)
            if before is None:
                return 0
            now, stream = datetime.now(UTC), streams.get_stream(session, stream_id)
            all_waiting = {each.stream_id: each for each in folding.all_held(session)}
            self._states.forget(all_waiting)
            waiting = all_waiting.get(stream_id)
            if waiting is None or stream is None or not held.is_due(waiting, now, self._tried):
                return 0  # another process was faster
            records = read_of_stream(
                session, stream_id, after=waiting.after_seq, up_to=before.seq, limit=self._batch_records
            )
            is_last = len(records) < self._batch_records
            after = Progress(before.seq, before.folds + 1, self._process_id)
            outcome = batch_fold.fold_batch(
                session,
                self._rules,
                self._states,
                {stream_id: records},
                {stream_id: stream},
                fold=after.folds,
                wanted=[stream_id] if is_last else (),
            )
            self._advance(session, waiting, records, outcome, now, is_last=is_last)
            after = self._end(session, before, after, outcome)
        self._hand_on(after, outcome, {stream_id: records}, {stream_id: stream})
        self._tried.add(stream_id)
        return 0 if stream_id in outcome.failures else len(records)

    def _advance(
        self,
        session: Session,
        waiting: HeldStream,
        records: Sequence[StoredRecord],
        outcome: Outcome,
        now: datetime,
        *,
        is_last: bool,
    ) -> None:
        failures = dict(outcome.failures)
        if error := failures.pop(waiting.stream_id, None):
            held.hold_again(session, waiting, error, now, self._metrics)
        else:
            held.advance(session, waiting, [record.seq for record in records], now, is_last=is_last)
        held.hold(session, failures, {}, folding.position(session), now, self._metrics)

    def _begin(self, session: Session) -> Progress | None:
        """None: another process folds. Raises where nothing could be stored, also while there is nothing to
        fold: an outage is told where nobody sends, too."""
        folding.expect_writable(session)
        seen = folding.progress(session)
        if self._is_anothers(seen) and not self._is_left_undone(session, seen):
            return None
        before, self._transaction = self._transaction, folding.lock_fold(session, self._transaction)
        if self._transaction.server != before.server:
            self._states.clear()
        progress = folding.progress(session)
        if progress != seen and self._is_anothers(progress):
            return None  # it held the lock, and got on
        self._states.follow(session, progress)
        return progress

    def _is_anothers(self, progress: Progress) -> bool:
        return progress.folded_by not in (None, self._process_id)

    def _is_left_undone(self, session: Session, progress: Progress) -> bool:
        """Whether there was something to do, and nobody got on: a fold that fails changes no progress."""
        now = datetime.now(UTC)
        due = [each for each in folding.all_held(session) if held.is_due(each, now, self._tried)]
        work = folding.lag(session).unread + len(due) + self._states.undescribed
        waited = self._watch.seconds_without_fold(progress, work)
        return work > 0 and waited >= self._take_over_seconds

    def _end(self, session: Session, before: Progress, after: Progress, outcome: Outcome) -> Progress:
        """Where nothing was read and nothing was found, nothing is written."""
        if after.seq == before.seq and not outcome.changed and not outcome.failures:
            return before
        if self._is_anothers(before):
            log.info("the fold is taken over from another sidecar", position=before.seq)
        folding.set_progress(session, after)
        return after

    def _hand_on(
        self,
        after: Progress,
        outcome: Outcome,
        records: Mapping[int, Sequence[StoredRecord]],
        known: Mapping[int, Stream],
    ) -> None:
        """After the commit: states are kept, an incident wakes its examination, traffic is counted."""
        self._states.committed(after, outcome.changed, outcome.described, outcome.failures)
        found = (finding for folded in outcome.changed.values() for finding in folded.findings)
        if any(isinstance(finding, _PAGING) for finding in found):
            self._on_found()
        self._count([record for each in outcome.changed for record in records[each]], known)

    def _count(self, records: Sequence[StoredRecord], known: Mapping[int, Stream]) -> None:
        for (stream_id, segment, kind), counts in counted(records).items():
            self._metrics.traffic.count(stream_key(known[stream_id]), segment, kind, counts)


def _by_stream(records: Sequence[StoredRecord], without: set[int]) -> dict[int, list[StoredRecord]]:
    by_stream: dict[int, list[StoredRecord]] = defaultdict(list)
    for record in records:
        if record.stream_id not in without:
            by_stream[record.stream_id].append(record)
    return dict(by_stream)


def stream_key(stream: Stream) -> StreamKey:
    return StreamKey(stream.server, stream.target, stream.draft_version, stream.method)
