"""The queue between HTTP and the database: bounds, failures, recovery, stopping."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import pytest
from sqlalchemy import text
from structlog.testing import capture_logs

from driftguard.errors import BadInput, Busy, DatabaseUnavailable
from driftguard.ingest import queue as ingest_queue
from driftguard.ingest.queue import IngestQueue
from driftguard.ingest.watch import IngestWatch
from driftguard.metrics import Metrics
from driftguard.records import AcceptanceRecord
from driftguard.store.database import INGEST, Database, DatabaseTimeout, Work
from driftguard.store.records import BatchResult
from tests.alerting.http_receiver import wait_until
from tests.api.ingest_server import is_held_up, kill_held_up, writers_held_up
from tests.store.black_hole import black_hole
from tests.store.samples import make_records

WAIT_SECONDS = 60


@contextmanager
def running(
    database: Database, *, limit: int = 1_000, on_commit: Callable[[], None] = lambda: None
) -> Iterator[IngestQueue]:
    metrics = Metrics()
    queue = IngestQueue(database, max_queued_records=limit, metrics=metrics, on_commit=on_commit)
    queue.start()
    try:
        yield queue
    finally:
        queue.stop()
    assert b"driftguard_ingest_queued_records 0.0" in metrics.exposition().splitlines()


def stored(database: Database) -> int:
    with database.session() as session:
        return session.scalar(text("SELECT count(*) FROM records")) or 0


def test_nothing_is_acknowledged_before_its_commit(database: Database) -> None:
    with running(database) as queue:
        with writers_held_up(database):
            future = queue.submit(make_records(3))
            with pytest.raises(TimeoutError):
                future.result(timeout=0.5)
        assert future.result(WAIT_SECONDS) == BatchResult(3, 0)


def test_a_full_queue_says_when_to_come_back(database: Database) -> None:
    with running(database, limit=10) as queue:
        with writers_held_up(database):
            accepted = [queue.submit(make_records(5, seed=seed)) for seed in range(2)]
            with pytest.raises(Busy, match="10 is the limit") as caught:
                queue.submit(make_records(1, seed=9))
            assert caught.value.retry_after_seconds >= 1
        assert [future.result(WAIT_SECONDS).accepted for future in accepted] == [5, 5]
        assert queue.submit(make_records(1, seed=9)).result(WAIT_SECONDS) == BatchResult(1, 0)


def test_who_is_answered_finds_room_for_the_next_batch(database: Database) -> None:
    more: list[Future[BatchResult]] = []
    with running(database, limit=10) as queue:
        with writers_held_up(database):
            first = queue.submit(make_records(10))
            first.add_done_callback(lambda _: more.append(queue.submit(make_records(10, seed=1))))
        wait_until(lambda: bool(more), "the next batch to be taken")
        assert more[0].result(WAIT_SECONDS) == BatchResult(10, 0)


def test_a_batch_larger_than_the_limit_passes_alone(database: Database) -> None:
    with running(database, limit=10) as queue:
        assert queue.submit(make_records(50)).result(WAIT_SECONDS) == BatchResult(50, 0)


def test_what_waits_is_written_in_few_transactions(database: Database) -> None:
    commits: list[None] = []
    with running(database, on_commit=lambda: commits.append(None)) as queue:
        with writers_held_up(database):
            futures = [queue.submit(make_records(2, seed=seed)) for seed in range(20)]
        assert all(future.result(WAIT_SECONDS).accepted == 2 for future in futures)
    assert 1 <= len(commits) <= 2
    assert stored(database) == 40


def test_stopping_writes_what_waits_and_takes_no_more(database: Database) -> None:
    with running(database) as queue:
        with writers_held_up(database):
            futures = [queue.submit(make_records(4, seed=seed)) for seed in range(3)]
            stopping = threading.Thread(target=queue.stop)
            stopping.start()
        stopping.join(WAIT_SECONDS)
        assert [future.result(0).accepted for future in futures] == [4, 4, 4]
        with pytest.raises(DatabaseUnavailable, match="stopping"):
            queue.submit(make_records(1, seed=9))


def test_lost_connections_are_told_and_the_writer_recovers(database: Database) -> None:
    batch = make_records(5)
    with running(database) as queue:
        assert queue.submit(make_records(1, seed=1)).result(WAIT_SECONDS).accepted == 1
        with writers_held_up(database):
            future = queue.submit(batch)
            wait_until(lambda: is_held_up(database), "the transaction")
            assert not future.done()
            kill_held_up(database)
            with pytest.raises(DatabaseUnavailable, match=r"closed the connection|terminat"):
                future.result(WAIT_SECONDS)
        assert stored(database) == 1
        assert queue.submit(batch).result(WAIT_SECONDS) == BatchResult(5, 0)


def test_a_database_that_is_down_refuses_every_batch(database_url: str) -> None:
    database = Database.open("postgresql://nobody@127.0.0.1:1/nothing")
    with running(database, limit=1) as queue:  # what was refused leaves its room
        for seed in range(2):
            with pytest.raises(DatabaseUnavailable, match="refused"):
                queue.submit(make_records(1, seed=seed)).result(WAIT_SECONDS)
    database.close()


def test_a_database_that_is_down_is_asked_again_after_a_while_or_at_a_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ingest_queue, "FIRST_BACKOFF_SECONDS", 600.0)
    monkeypatch.setattr(ingest_queue, "MAX_BACKOFF_SECONDS", 600.0)
    database = Database.open("postgresql://nobody@127.0.0.1:1/nothing")
    with running(database) as queue:
        with pytest.raises(DatabaseUnavailable, match="refused"):
            queue.submit(make_records(1)).result(WAIT_SECONDS)
        waiting = queue.submit(make_records(1, seed=1))
        with pytest.raises(TimeoutError):
            waiting.result(timeout=0.5)
        queue.stop()
        with pytest.raises(DatabaseUnavailable, match="refused"):
            waiting.result(0)
    database.close()


def too_large() -> list[AcceptanceRecord]:
    huge = {"steps": 0, "drafted": 2**62, "accepted": 2**62, "emitted": 2**62}
    positions = {"drafted_per_position": None, "accepted_per_position": None}
    return make_records(3, seed=2, segments=1, **huge, **positions)


def with_names_that_no_index_can_hold() -> list[AcceptanceRecord]:
    rng = np.random.default_rng(5)
    names = ["".join(map(chr, rng.integers(0x4E00, 0x9FFF, 256))) for _ in range(4)]
    long: dict[str, Any] = dict(zip(("server", "target", "draft_version", "method"), names, strict=True))
    return make_records(1, seed=2, **long)


@pytest.mark.parametrize(
    ("impossible", "told"),
    [
        (too_large, "out of range"),
        (with_names_that_no_index_can_hold, "too large for the database: index row size"),
    ],
)
def test_one_impossible_batch_does_not_fail_the_others(
    database: Database, impossible: Callable[[], list[AcceptanceRecord]], told: str
) -> None:
    with running(database) as queue:
        with writers_held_up(database):
            first = queue.submit(make_records(1, seed=1))
            poison = queue.submit(impossible())
            last = queue.submit(make_records(2, seed=3))
        assert first.result(WAIT_SECONDS) == BatchResult(1, 0)
        with pytest.raises(BadInput, match=told):
            poison.result(WAIT_SECONDS)
        assert last.result(WAIT_SECONDS) == BatchResult(2, 0)
    assert stored(database) == 3


def test_records_of_a_stream_whose_first_batch_failed_belong_to_it(database: Database) -> None:
    with running(database) as queue:
        with pytest.raises(BadInput, match="out of range"):
            queue.submit(too_large()).result(WAIT_SECONDS)
        assert queue.submit(make_records(2, seed=2, segments=1)).result(WAIT_SECONDS) == BatchResult(2, 0)
    with database.session() as session:
        of_streams = session.scalar(text("SELECT count(*) FROM records JOIN streams ON id = stream_id"))
    assert of_streams == 2


def test_a_connection_that_died_silently_is_told_and_nothing_is_stored_twice(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("driftguard.store.database.ANSWER_MARGIN_SECONDS", 0.2)
    monkeypatch.setattr(ingest_queue, "INGEST", Work("ingest", 0.3, 0.3, 60))
    batch = make_records(5)
    with black_hole(database.libpq_url) as hole:
        far = Database.open(f"{hole.url}&connect_timeout=2")
        with running(far) as queue:
            assert queue.submit(make_records(1, seed=1)).result(WAIT_SECONDS).accepted == 1
            hole.hold("to_client")  # what is asked for arrives, its answers do not
            with pytest.raises(DatabaseUnavailable, match=r"timeout|no answer"):
                queue.submit(batch).result(WAIT_SECONDS)
            hole.resume()
            again = queue.submit(batch).result(WAIT_SECONDS)
            assert again.accepted + again.duplicates == 5
        far.close()
    assert stored(database) == 6


def test_the_age_of_the_oldest_batch_is_told_and_its_end(database: Database) -> None:
    with running(database) as queue, capture_logs() as logs:
        watch = IngestWatch(queue, longest_wait_seconds=0.2)
        watch.look()
        assert (queue.oldest_unacknowledged_seconds(), logs) == (0.0, [])
        with writers_held_up(database):
            future = queue.submit(make_records(3))
            wait_until(lambda: queue.oldest_unacknowledged_seconds() > 0.2, "the batch to grow old")
            queue.submit(make_records(1, seed=1))
            assert queue.oldest_unacknowledged_seconds() > 0.2, "the newer batch hides the older one"
            watch.look()
            watch.look()
        future.result(WAIT_SECONDS)
        wait_until(lambda: queue.oldest_unacknowledged_seconds() == 0.0, "the other batch")
        watch.look()
        watch.look()
    assert [log["event"] for log in logs] == ["ingest_stuck", "ingest_moves_again"]


def retried(queue: IngestQueue, records: list[AcceptanceRecord]) -> Future[BatchResult]:
    """As a sender does that is told to come back."""
    taken: list[Future[BatchResult]] = []

    def is_taken() -> bool:
        with suppress(Busy):
            taken.append(queue.submit(records))
        return bool(taken)

    wait_until(is_taken, "room in the queue")
    return taken[0]


def test_who_waits_can_be_refused_and_what_was_written_meanwhile_is_a_duplicate(database: Database) -> None:
    batches = [make_records(2, seed=seed) for seed in range(3)]
    with running(database, limit=6) as queue:
        with writers_held_up(database):
            futures = [queue.submit(batches[0])]
            wait_until(lambda: is_held_up(database), "the transaction")
            futures += [queue.submit(batch) for batch in batches[1:]]
            assert queue.refuse_unacknowledged(DatabaseUnavailable("not now")) == 3
            assert queue.refuse_unacknowledged(DatabaseUnavailable("not now")) == 0
            assert queue.oldest_unacknowledged_seconds() == 0.0
            for future in futures:
                with pytest.raises(DatabaseUnavailable, match="not now"):
                    future.result(0)
        wait_until(lambda: stored(database) == 2, "the transaction to end")
        again = [retried(queue, batch) for batch in batches]  # all of them find room
        assert [one.result(WAIT_SECONDS) for one in again] == [
            BatchResult(0, 2),
            BatchResult(2, 0),
            BatchResult(2, 0),
        ]
    assert stored(database) == 6


def test_a_batch_whose_sender_left_while_it_waited_is_dropped(database: Database) -> None:
    with running(database, limit=6) as queue:
        with writers_held_up(database):
            first = queue.submit(make_records(2))
            wait_until(lambda: is_held_up(database), "the transaction")
            assert queue.submit(make_records(4, seed=1)).cancel()
        assert first.result(WAIT_SECONDS) == BatchResult(2, 0)
        more = make_records(6, seed=2)
        assert retried(queue, more).result(WAIT_SECONDS) == BatchResult(6, 0)
    assert stored(database) == 8


def test_a_database_that_is_too_slow_for_a_transaction_is_given_smaller_ones(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_queue, "INGEST", Work("ingest", 0.2, 60, 60))
    with running(database, limit=100_000) as queue, capture_logs() as logs:
        with writers_held_up(database), pytest.raises(DatabaseTimeout, match="ingest: a statement"):
            queue.submit(make_records(1)).result(WAIT_SECONDS)
        monkeypatch.setattr(ingest_queue, "INGEST", INGEST)
        assert queue.submit(make_records(1)).result(WAIT_SECONDS).accepted == 1
    (smaller,) = [log for log in logs if log["event"] == "ingest_transactions_become_smaller"]
    assert smaller["records"] == 10_000


def test_transactions_become_smaller_where_they_are_too_slow_and_grow_again(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    commits: list[None] = []
    monkeypatch.setattr(ingest_queue, "MAX_RECORDS_PER_TRANSACTION", 16)
    monkeypatch.setattr(ingest_queue, "LEAST_RECORDS_PER_TRANSACTION", 4)
    monkeypatch.setattr(ingest_queue, "INGEST", Work("ingest", 0.2, 60, 60))
    with running(database, on_commit=lambda: commits.append(None)) as queue:
        with writers_held_up(database):
            for seed in range(2):  # 16, 8, 4 records
                with pytest.raises(DatabaseTimeout, match="ingest: a statement"):
                    queue.submit(make_records(2, seed=seed)).result(WAIT_SECONDS)
        monkeypatch.setattr(ingest_queue, "INGEST", INGEST)
        with writers_held_up(database):
            first = queue.submit(make_records(2))
            wait_until(lambda: is_held_up(database), "the transaction")
            rest = [queue.submit(make_records(2, seed=seed)) for seed in range(2, 14)]
        assert [one.result(WAIT_SECONDS).accepted for one in (first, *rest)] == [2] * 13
    assert len(commits) == 4  # of 2, then of 8, 12 and the last 4 records
