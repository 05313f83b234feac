"""Between the HTTP endpoint and the database: a bounded queue and the one thread that writes.

All waiting batches are written in one transaction, so that many small batches cost one commit. A batch is
acknowledged only after its commit.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime

import structlog
from psycopg import DataError

from driftguard.errors import BadInput, Busy, DatabaseUnavailable, DriftGuardError
from driftguard.metrics import Metrics
from driftguard.records import AcceptanceRecord
from driftguard.store.database import INGEST, Database, DatabaseTimeout
from driftguard.store.records import BatchResult, insert_batches
from driftguard.store.streams import StreamRegistry

MAX_RECORDS_PER_TRANSACTION = 20_000
LEAST_RECORDS_PER_TRANSACTION = 500
RETRY_AFTER_SECONDS = 1
FIRST_BACKOFF_SECONDS = 0.1
MAX_BACKOFF_SECONDS = 5.0
STREAMS_FULL_LOG_SECONDS = 60.0  # between two lines
_log = structlog.get_logger(__name__)


def _nothing() -> None:
    return None


@dataclass(slots=True)
class _Submission:
    records: Sequence[AcceptanceRecord]
    future: Future[BatchResult] = field(default_factory=Future)
    arrived_at: float = field(default_factory=time.monotonic)


class IngestQueue:
    """Accepts batches from any thread; one thread of its own writes them.

    `on_commit` is called on the writer's thread after each commit that stored something new: it must
    return at once.
    """

    def __init__(
        self,
        database: Database,
        *,
        max_queued_records: int,
        metrics: Metrics,
        max_streams: int | None = None,
        on_commit: Callable[[], None] = _nothing,
    ) -> None:
        self._database = database
        self._max_queued_records = max_queued_records
        self._metrics = metrics
        self._on_commit = on_commit
        self._waiting: deque[_Submission] = deque()
        self._writing: Sequence[_Submission] = ()
        self._records_per_transaction = MAX_RECORDS_PER_TRANSACTION
        self._changed = threading.Condition()
        self._unacknowledged = 0  # records waiting or in the transaction that is being written
        self._stopping = False
        self._backoff_seconds = 0.0
        self._registry = StreamRegistry(max_streams)
        self._told_full_at: float | None = None
        metrics.ingest.queued_records.set_function(lambda: self._unacknowledged)
        metrics.ingest.oldest_unacknowledged.set_function(self.oldest_unacknowledged_seconds)
        self._thread = threading.Thread(target=self._write_until_stopped, name="ingest-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop_soon(self) -> None:
        """Later submissions raise DatabaseUnavailable; waiting batches are written. Returns at once."""
        with self._changed:
            self._stopping = True
            self._changed.notify()

    def stop(self) -> None:
        """Writes the waiting batches, then ends the thread. Later submissions raise DatabaseUnavailable."""
        self.stop_soon()
        if self._thread.is_alive():
            self._thread.join()

    def oldest_unacknowledged_seconds(self) -> float:
        """The age of the oldest waiting batch; 0 if none waits."""
        with self._changed:
            waiting = [*self._writing, *list(self._waiting)[:1]]
            arrived = [item.arrived_at for item in waiting if not item.future.done()]
        return time.monotonic() - min(arrived) if arrived else 0.0

    def refuse_unacknowledged(self, error: DriftGuardError) -> int:
        """Refuses all waiting batches. The one that is being written may still be stored; if it is sent
        again, it is not stored twice. Returns how many batches were refused."""
        with self._changed:
            waiting = [item.future for item in (*self._writing, *self._waiting) if not item.future.done()]
            for future in waiting:
                with suppress(InvalidStateError):  # its client has just disconnected
                    future.set_exception(error)
        return len(waiting)

    def submit(self, records: Sequence[AcceptanceRecord]) -> Future[BatchResult]:
        """Queues a batch; the future ends after the commit.

        Raises Busy when the queue is full, DatabaseUnavailable when the sidecar is stopping. The future
        raises DatabaseUnavailable when the transaction failed: nothing of the batch is acknowledged then.
        """
        submission = _Submission(records)
        if not records:
            submission.future.set_result(BatchResult(accepted=0, duplicates=0))
            return submission.future
        with self._changed:
            if self._stopping:
                raise DatabaseUnavailable("the sidecar is stopping; send the batch again later")
            # An empty queue takes any batch: otherwise one larger than the limit could never pass.
            if self._unacknowledged and self._unacknowledged + len(records) > self._max_queued_records:
                self._metrics.ingest.records.labels("rejected_queue_full").inc(len(records))
                raise Busy(
                    f"{self._unacknowledged} records wait for the database and "
                    f"{self._max_queued_records} is the limit; send the batch again later",
                    retry_after_seconds=RETRY_AFTER_SECONDS,
                )
            self._waiting.append(submission)
            self._unacknowledged += len(records)
            self._changed.notify()
        return submission.future

    def _write_until_stopped(self) -> None:
        while group := self._next_group():
            self._write(group)
            if self._backoff_seconds:
                with self._changed:
                    self._changed.wait_for(lambda: self._stopping, timeout=self._backoff_seconds)

    def _next_group(self) -> list[_Submission]:
        """Waits for work; an empty list means that the queue was stopped and is drained."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._stopping)
            group: list[_Submission] = []
            records = 0
            while self._waiting and (not group or records < self._records_per_transaction):
                submission = self._waiting.popleft()
                records += len(submission.records)
                group.append(submission)
            self._writing = group
            return group

    def _write(self, group: list[_Submission]) -> None:
        # A batch whose client disconnected, or that was refused while it waited, is dropped: it was not
        # acknowledged.
        with self._changed:
            wanted = [
                item
                for item in group
                if not item.future.done() and item.future.set_running_or_notify_cancel()
            ]
            gone = [item for item in group if item.future.done()]
        self._make_room(gone)
        if wanted:
            self._store(wanted)
        self._writing = ()

    def _make_room(self, group: Iterable[_Submission]) -> None:
        """Called before the sender is answered, because it may send the next batch at once."""
        with self._changed:
            self._unacknowledged -= sum(len(submission.records) for submission in group)

    def _store(self, group: list[_Submission]) -> None:
        try:
            with self._database.session(INGEST) as session:
                results = insert_batches(
                    session, [item.records for item in group], self._registry, datetime.now(UTC)
                )
        except Exception as error:  # noqa: BLE001 (the thread survives any failure, and every waiting future receives it)
            self._registry.forget()
            self._handle_failure(group, error)
            return
        self._backoff_seconds = 0.0
        more = self._records_per_transaction + LEAST_RECORDS_PER_TRANSACTION
        self._records_per_transaction = min(more, MAX_RECORDS_PER_TRANSACTION)
        self._metrics.database.stored()
        self._make_room(group)
        self._count_refused(group, results)
        with self._changed:
            for submission, result in zip(group, results, strict=True):
                if not submission.future.done():
                    submission.future.set_result(result)
        if any(result.accepted for result in results):
            self._on_commit()

    def _count_refused(self, group: Sequence[_Submission], results: Sequence[BatchResult]) -> None:
        refused = [
            why
            for item, result in zip(group, results, strict=True)
            for _, why in result.refusals(item.records)
        ]
        if not refused:
            return
        self._metrics.ingest.stream_limit_refused_records.inc(len(refused))
        now = time.monotonic()
        if self._told_full_at is None or now - self._told_full_at >= STREAMS_FULL_LOG_SECONDS:
            self._told_full_at = now
            _log.warning("ingest_streams_full", records=len(refused), first=refused[0])

    def _handle_failure(self, group: list[_Submission], error: Exception) -> None:
        if isinstance(error, (DataError, BadInput)) and len(group) > 1:
            # One batch holds a value that the database refuses; the others must not fail with it.
            for submission in group:
                self._store([submission])
            return
        if isinstance(error, DataError):
            error = BadInput(f"the database refuses a value in this batch: {error}")
        elif isinstance(error, DatabaseUnavailable):
            doubled = max(FIRST_BACKOFF_SECONDS, 2 * self._backoff_seconds)
            self._backoff_seconds = min(doubled, MAX_BACKOFF_SECONDS)
            self._metrics.database.refused()
            _log.warning("ingest_database_unavailable", detail=error.detail, wait=self._backoff_seconds)
            if isinstance(error, DatabaseTimeout) and error.reason == "statement":
                self._write_less()
        else:
            _log.error("ingest_failed", exc_info=error)
        self._make_room(group)
        with self._changed:
            for submission in group:
                if not submission.future.done():
                    submission.future.set_exception(error)

    def _write_less(self) -> None:
        """Halves the size of transactions: the database would be too slow for as many records again."""
        halved = max(self._records_per_transaction // 2, LEAST_RECORDS_PER_TRANSACTION)
        if halved < self._records_per_transaction:
            _log.warning("ingest_transactions_become_smaller", records=halved)
        self._records_per_transaction = halved
