"""A lock whose holder went silent in the middle of a message, as behind a pooler when packets are dropped."""

from __future__ import annotations

import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime

import psycopg
import pytest
from sqlalchemy import text

from driftguard.detection import DetectorConfig
from driftguard.errors import DatabaseUnavailable
from driftguard.ingest import queue
from driftguard.ingest.queue import IngestQueue
from driftguard.metrics import Metrics
from driftguard.pipeline import fold_loop
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.store import captures, folding, partitions, records
from driftguard.store.advisory_locks import taking_lock
from driftguard.store.captures import CapturedRequest, insert_captures
from driftguard.store.database import Database, DatabaseTimeout, Work
from driftguard.store.records import insert_batches
from driftguard.store.streams import StreamRegistry
from tests.alerting.http_receiver import wait_until
from tests.pipeline.traffic import Traffic, store
from tests.store.black_hole import black_hole
from tests.store.samples import make_records

LONG = Work("work", statement_seconds=30, lock_seconds=20, idle_seconds=60)
KEY = 4_711
SHORT = Work("short work", statement_seconds=0.2, lock_seconds=0.1, idle_seconds=60)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driftguard.store.database.ANSWER_MARGIN_SECONDS", 0.2)


@contextmanager
def silent_holder(database: Database) -> Iterator[psycopg.Connection]:
    """Has the lock, and has sent the first part of its next statement."""
    with ExitStack() as stack:
        holder = stack.enter_context(psycopg.connect(database.libpq_url))
        stack.callback(holder.close)  # without a commit, for which the server would read the rest
        holder.execute("SET statement_timeout = '100ms'")
        holder.commit()
        holder.execute("SELECT pg_advisory_xact_lock(%s::bigint)", [KEY])
        parse = b"\0SELECT 1\0" + struct.pack("!h", 0)
        os.write(holder.fileno(), b"P" + struct.pack("!i", len(parse) + 4) + parse)
        os.write(holder.fileno(), b"B" + struct.pack("!i", 1_000) + b"\0")
        watching = stack.enter_context(psycopg.connect(database.libpq_url, autocommit=True))
        look = (
            "SELECT state = 'active' AND wait_event = 'ClientRead' "
            "AND state_change < clock_timestamp() - interval '0.5 s' FROM pg_stat_activity WHERE pid = %s"
        )
        pid = holder.info.backend_pid
        wait_until(lambda: watching.execute(look, [pid]).fetchone() == (True,), "the holder to be overdue")
        yield holder


def test_records_are_stored_although_another_sender_of_them_went_silent(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(partitions, "_INGEST_LOCK", taking_lock(KEY, SHORT))
    with silent_holder(database), database.session(LONG) as session:
        (stored,) = insert_batches(session, [make_records(10)], StreamRegistry(), datetime.now(UTC))
    assert stored.accepted == 10


def test_the_fold_goes_on_although_the_one_before_went_silent(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folding, "_LOCK", taking_lock(KEY, SHORT))
    store(database, Traffic(seed=3).draw(10, {"chat": 0.75}))
    with silent_holder(database):
        assert Pipeline(database, DetectorConfig(), Metrics()).fold_batch() == 10


def test_the_fold_goes_on_although_the_network_ended_between_two_of_its_statements(
    database: Database, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its session has the lock, and waits for a statement that was sent and never arrives."""
    monkeypatch.setattr(fold_loop, "FOLD", Work("fold", statement_seconds=3, lock_seconds=2, idle_seconds=60))
    store(database, Traffic(seed=3).draw(10, {"chat": 0.75}))
    with ExitStack() as stack:
        hole = stack.enter_context(black_hole(database_url))
        far = Database.open(hole.url)
        stack.callback(far.close)

        def swallow(*_: object) -> None:
            hole.hold("to_database", new_connections=False)

        pipeline = Pipeline(far, DetectorConfig(), Metrics(), after_fold=[swallow])
        with pytest.raises(DatabaseTimeout, match="no answer"):
            pipeline.fold_batch()
        monkeypatch.setattr(hole, "hold", lambda *_, **__: None)
        assert pipeline.fold_batch() == 10


def test_records_are_stored_although_the_network_ended_between_two_statements_of_the_last_ones(
    database: Database, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue, "INGEST", Work("ingest", statement_seconds=3, lock_seconds=2, idle_seconds=60))
    with ExitStack() as stack:
        hole = stack.enter_context(black_hole(database_url))
        far = Database.open(hole.url)
        stack.callback(far.close)

        def swallow(*_: object) -> None:
            hole.hold("to_database", new_connections=False)
            monkeypatch.setattr(records, "ensure_days", partitions.ensure_days)

        monkeypatch.setattr(records, "ensure_days", swallow)
        ingest = IngestQueue(far, max_queued_records=100, metrics=Metrics())
        ingest.start()
        stack.callback(ingest.stop)
        with pytest.raises(DatabaseUnavailable):
            ingest.submit(make_records(10)).result(60)
        assert ingest.submit(make_records(10)).result(60).accepted == 10


def test_a_commit_that_waits_for_a_standby_is_not_ended(database: Database) -> None:
    """It would be committed all the same, and its session would go on waiting, one more each time."""
    with ExitStack() as stack:
        holder, watching = (stack.enter_context(psycopg.connect(database.libpq_url)) for _ in range(2))
        watching.autocommit = True
        stack.callback(_wait_for_standbys, watching, "")
        _wait_for_standbys(watching, "nobody")
        committing = stack.enter_context(ThreadPoolExecutor(1))
        stack.callback(_wait_for_standbys, watching, "")  # before the commit is waited for
        holding = _begin(holder)
        committed = committing.submit(holder.commit)

        def waits() -> bool:
            nonlocal holding, committed
            if committed.done():  # the setting shows before the checkpointer tells commits of it
                holding = _begin(holder)
                committed = committing.submit(holder.commit)
            look = "SELECT wait_event = 'SyncRep' FROM pg_stat_activity WHERE pid = %s"
            return watching.execute(look, [holder.info.backend_pid]).fetchone() == (True,)

        wait_until(waits, "the commit to wait")
        with pytest.raises(DatabaseTimeout, match="for a lock"), database.session(SHORT) as session:
            session.execute(taking_lock(KEY, SHORT), holding)
        _wait_for_standbys(watching, "")
        committed.result(60)


def _begin(holder: psycopg.Connection) -> dict[str, object]:
    """Takes the lock in a transaction that has something to commit: what another needs to end it."""
    holder.execute("SELECT pg_advisory_xact_lock(%s::bigint)", [KEY])
    holder.execute("SET LOCAL synchronous_commit = 'on'")  # which the server of the tests is not
    holder.execute("SELECT pg_logical_emit_message(true, 'test', 'written')")
    (since,) = holder.execute("SELECT now()").fetchone() or (None,)
    return {"abandoned_pid": holder.info.backend_pid, "abandoned_since": since}


def _wait_for_standbys(connection: psycopg.Connection, names: str) -> None:
    connection.execute(f"ALTER SYSTEM SET synchronous_standby_names = '{names}'")
    connection.execute("SELECT pg_reload_conf()")
    shown = "SELECT current_setting('synchronous_standby_names') = %s"
    wait_until(lambda: connection.execute(shown, [names]).fetchone() == (True,), "the setting")


def test_the_fold_waits_for_that_of_another_sidecar_between_two_statements(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fold_loop, "FOLD", SHORT)
    store(database, Traffic(seed=3).draw(10, {"chat": 0.75}))
    pipeline = Pipeline(database, DetectorConfig(), Metrics())
    with database.session(LONG) as session:
        folding.lock_fold(session)
        for _ in range(2):
            with pytest.raises(DatabaseTimeout, match="for a lock"):
                pipeline.fold_batch()
        assert session.scalar(text("SELECT true"))


def test_captures_are_kept_although_another_sender_of_them_went_silent(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captures, "_CAPTURE_LOCK", taking_lock(KEY, SHORT))
    (record,) = make_records(1)
    captured = CapturedRequest(
        record_id=record.record_id,
        server=record.server,
        target=record.target,
        draft_version=record.draft_version,
        captured_at=record.ended_at,
        prompt_token_ids=[1],
        output_token_ids=[2],
    )
    with silent_holder(database), database.session(LONG) as session:
        assert insert_captures(session, [captured], max_per_segment=10) == 1


def test_a_holder_that_works_is_waited_for(database: Database) -> None:
    with psycopg.connect(database.libpq_url) as holder:
        holder.execute("SELECT pg_advisory_xact_lock(%s::bigint)", [KEY])
        with (
            pytest.raises(DatabaseTimeout, match="for a lock"),
            database.session(SHORT) as session,
        ):
            session.execute(taking_lock(KEY, SHORT))
        assert holder.execute("SELECT true").fetchone() == (True,)
    with database.session(LONG) as session:
        session.execute(taking_lock(KEY, SHORT))
        assert session.scalar(text("SELECT true"))
