"""What is past retention goes, whatever happens in between, and ingest never waits for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from unittest.mock import Mock

import psycopg
import pytest
from sqlalchemy import text
from structlog.testing import capture_logs

from driftguard.errors import DatabaseUnavailable
from driftguard.store import retention
from driftguard.store.database import INGEST, MAINTENANCE, Database
from driftguard.store.records import insert_batches
from driftguard.store.retention import maintain
from driftguard.store.sources import all_sources
from driftguard.store.streams import StreamRegistry
from driftguard.store.tables import Source
from tests.conftest import PATIENCE_SECONDS
from tests.store.samples import make_records
from tests.store.test_partitions import NOON, RETENTION, partitions

OLD = NOON - timedelta(days=40)
OLD_DAY = "20260129"


def store(database: Database, *moments: datetime, seed: int = 0) -> None:
    with database.session() as session:
        for number, moment in enumerate(moments):
            records = make_records(2, seed=100 * seed + number, ended_at=moment)
            insert_batches(session, [records], StreamRegistry(), NOON)


def count(database: Database, table: str) -> int:
    with database.session() as session:
        return session.scalar(text(f"SELECT count(*) FROM {table}")) or 0


def existing(database: Database, name: str) -> bool:
    with database.session() as session:
        return session.scalar(text("SELECT to_regclass(:name)"), {"name": name}) is not None


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Maintenance that gives up on a lock soon."""
    monkeypatch.setattr(retention, "MAINTENANCE", replace(MAINTENANCE, name="impatient", lock_seconds=0.2))


@contextmanager
def reading(database: Database, table: str) -> Iterator[None]:
    """An open transaction that has read the table."""
    with database.session() as session:
        session.execute(text(f"SELECT count(*) FROM {table}"))
        yield


def test_only_days_wholly_past_retention_are_dropped(database: Database) -> None:
    edge = NOON - timedelta(days=30)
    store(database, edge - timedelta(days=1), edge)
    assert maintain(database, NOON, RETENTION).dropped == ["records_20260207"]
    assert "records_20260208" in partitions(database)
    assert count(database, "records") == 2


def test_a_day_is_kept_until_records_of_it_cannot_be_under_way_any_more(database: Database) -> None:
    store(database, OLD)
    midnight = datetime(2026, 3, 1, tzinfo=UTC)  # 30 days after the end of that day
    assert maintain(database, midnight + timedelta(minutes=59), RETENTION).dropped == []
    assert maintain(database, midnight + timedelta(minutes=60), RETENTION).dropped == [f"records_{OLD_DAY}"]


def test_each_tier_is_kept_for_its_own_time(database: Database) -> None:
    ages = (5, 34, 36, 399, 431, 1_500, 2_200)
    store(database, *(NOON - timedelta(days=age) for age in ages))
    settings = RETENTION.model_copy(update={"rollups_days": 1_830})
    maintain(database, NOON, settings)
    tables = ("records", "rollups_1m", "rollups_1h", "rollups_1d")
    kept = []
    with database.session() as session:
        for table in tables:
            time_of = "ended_at" if table == "records" else "minute"
            newest_first = f"SELECT DISTINCT {time_of}::date FROM {table} ORDER BY 1 DESC"
            kept.append([(NOON.date() - day).days for day in session.scalars(text(newest_first))])
    assert kept == [[5], [5, 34], [5, 34, 36, 399], [5, 34, 36, 399, 431, 1_500]]


def test_no_rollup_outlives_rollups_days(database: Database) -> None:
    store(database, NOON, NOON - timedelta(days=500))
    maintain(database, NOON, RETENTION.model_copy(update={"rollups_days": 30}))
    for table in ("rollups_1m", "rollups_1h", "rollups_1d"):
        with database.session() as session:
            assert set(session.scalars(text(f"SELECT minute::date FROM {table}"))) == {NOON.date()}


def test_captures_past_retention_are_deleted_in_batches_whatever_keeps_the_rest(
    database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "CAPTURES_AT_ONCE", 3)
    insert = text(
        "INSERT INTO captures (record_id, server, target, draft_version, segment, captured_at, "
        "prompt_token_ids, output_token_ids) SELECT gen_random_uuid(), 's', 't', 'v', 'c', :at, "
        "'{1}', '{2}' FROM generate_series(1, :rows)"
    )
    with database.session() as session:
        for age, rows in ((8, 7), (6, 2)):
            session.execute(insert, {"at": NOON - timedelta(days=age), "rows": rows})
    with monkeypatch.context() as broken:
        broken.delattr(retention, "_drop_marked")
        with pytest.raises(NameError):
            maintain(database, NOON, RETENTION)
    assert count(database, "captures") == 2
    with database.session() as session:
        session.execute(insert, {"at": NOON - timedelta(days=8), "rows": 7})
    assert maintain(database, NOON, RETENTION).captures_deleted == 7
    assert count(database, "captures") == 2


def test_captures_of_a_clock_that_was_ahead_are_kept_no_longer_than_others(database: Database) -> None:
    """They may hold text: captures_days is a promise."""
    now = datetime.now(UTC)
    insert = text(
        "INSERT INTO captures (record_id, server, target, draft_version, segment, captured_at, "
        "prompt_token_ids, output_token_ids) "
        "VALUES (gen_random_uuid(), 's', 't', 'v', 'c', :at, '{1}', '{2}')"
    )
    with database.session() as session:
        session.execute(insert, {"at": now + timedelta(days=30)})
        session.execute(insert, {"at": now - timedelta(days=1)})
    maintain(database, now, RETENTION)
    with database.session() as session:
        oldest, newest = session.scalars(text("SELECT captured_at FROM captures ORDER BY captured_at"))
    assert oldest == now - timedelta(days=1)
    assert now <= newest < now + timedelta(minutes=5)


def test_counts_of_unrecorded_requests_are_kept_as_long_as_records(database: Database) -> None:
    with database.session() as session:
        for days in (31, 29):
            hour = (NOON - timedelta(days=days)).isoformat()
            session.execute(
                text(
                    "INSERT INTO unrecorded_requests VALUES (:hour, 's', 'no_numbers', gen_random_uuid(), 1)"
                ),
                {"hour": hour},
            )
    assert maintain(database, NOON, RETENTION).unrecorded_deleted == 1
    assert count(database, "unrecorded_requests") == 1


def waiting(database: Database) -> list[str]:
    """Statements of maintenance that wait for a lock."""
    with database.session() as session:
        return list(
            session.scalars(
                text(
                    "SELECT query FROM pg_stat_activity WHERE datname = current_database() "
                    "AND wait_event_type = 'Lock' AND query LIKE 'ALTER TABLE%DETACH%'"
                )
            )
        )


def wait_until_it_waits(database: Database, running: Future[Any]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not waiting(database):
        assert not running.done(), running.result()
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("table", ["records", "rollups_1m", "rollups_1h", "rollups_1d"])
def test_ingest_goes_on_while_maintenance_waits_for_a_reader(
    database: Database, monkeypatch: pytest.MonkeyPatch, table: str
) -> None:
    """Also into a day that has no partition yet."""
    patient = replace(MAINTENANCE, name="patient", lock_seconds=10 * PATIENCE_SECONDS)
    monkeypatch.setattr(retention, "MAINTENANCE", patient)
    ancient = NOON - timedelta(days=2_200)
    store(database, ancient)
    ingest = replace(INGEST, statement_seconds=PATIENCE_SECONDS, lock_seconds=PATIENCE_SECONDS)
    with ThreadPoolExecutor(1) as threads:
        with reading(database, table):
            running = threads.submit(maintain, database, NOON, RETENTION)
            wait_until_it_waits(database, running)
            for moment in (NOON, NOON - timedelta(days=20), NOON + timedelta(days=9)):
                with database.session(ingest) as session:
                    insert_batches(session, [make_records(2, ended_at=moment)], StreamRegistry(), NOON)
            assert waiting(database)  # the whole time
            assert not running.done()
        dropped = running.result(PATIENCE_SECONDS).dropped
    assert f"{table}_{ancient:%Y}" in {name[: len(table) + 5] for name in dropped}
    assert count(database, "records") == 6


@pytest.mark.usefixtures("impatient")
def test_what_a_reader_held_too_long_goes_the_next_time(database: Database) -> None:
    store(database, OLD)
    with reading(database, "records"):
        done = maintain(database, NOON, RETENTION)
        assert done.dropped == [f"rollups_1m_{OLD_DAY}"]  # it holds up nothing else
        assert "records_20260313" in done.created
        assert maintain(database, NOON, RETENTION).dropped == []  # half detached: still waits
        store(database, NOON, NOON - timedelta(days=20), seed=1)
    assert maintain(database, NOON, RETENTION).dropped == [f"records_{OLD_DAY}"]
    assert not existing(database, f"records_{OLD_DAY}")


def test_maintenance_that_is_killed_while_it_detaches_is_completed_by_the_next(database: Database) -> None:
    store(database, OLD, OLD + timedelta(days=1))
    with ThreadPoolExecutor(1) as threads, reading(database, "records"):
        running = threads.submit(maintain, database, NOON, RETENTION)
        wait_until_it_waits(database, running)
        with psycopg.connect(database.libpq_url, autocommit=True) as other:
            other.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                "WHERE datname = current_database() AND query LIKE 'ALTER TABLE%DETACH%' "
                "AND pid <> pg_backend_pid()"
            )
        with pytest.raises(DatabaseUnavailable):
            running.result(PATIENCE_SECONDS)
    with database.session() as session:
        assert session.scalar(text("SELECT count(*) FROM pg_inherits WHERE inhdetachpending")) == 1
    store(database, NOON, seed=1)
    assert sorted(maintain(database, NOON, RETENTION).dropped) == [
        "records_20260129",
        "records_20260130",
        "rollups_1m_20260129",
        "rollups_1m_20260130",
    ]
    assert count(database, "records") == 2


class Killed(Exception):
    """The process ended here."""


@pytest.fixture
def detached_only(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    """Maintenance ended between detaching and dropping."""
    store(database, OLD)
    with monkeypatch.context() as patched:
        before_and_after_detaching = Mock(side_effect=([], Killed))
        patched.setattr(retention, "_drop_marked", before_and_after_detaching)
        with pytest.raises(Killed):
            maintain(database, NOON, RETENTION)
    assert partitions(database) == [f"records_202603{day}" for day in (10, 11, 12, 13)]
    assert existing(database, f"records_{OLD_DAY}")


@pytest.mark.usefixtures("detached_only")
def test_what_was_detached_and_not_dropped_is_dropped_by_the_next(database: Database) -> None:
    done = maintain(database, NOON, RETENTION)
    assert sorted(done.dropped) == [f"records_{OLD_DAY}", f"rollups_1m_{OLD_DAY}"]
    assert not existing(database, f"records_{OLD_DAY}")


@pytest.mark.usefixtures("detached_only")
def test_a_late_record_brings_a_detached_day_back_where_retention_was_raised(database: Database) -> None:
    store(database, OLD, seed=1)
    raised = RETENTION.model_copy(update={"records_days": 50, "minute_rollups_days": 50})
    assert maintain(database, NOON, raised).dropped == []
    assert count(database, "records") == 4
    for table in ("rollups_1m", "rollups_1h", "rollups_1d"):
        with database.session() as session:
            assert session.scalar(text(f"SELECT sum(records) FROM {table}")) == 4
    assert sorted(maintain(database, NOON, RETENTION).dropped) == [
        f"records_{OLD_DAY}",
        f"rollups_1m_{OLD_DAY}",
    ]


def test_tables_that_others_detached_or_made_stay(database: Database) -> None:
    store(database, OLD)
    with database.session() as session:
        session.execute(text(f"ALTER TABLE records DETACH PARTITION records_{OLD_DAY}"))
        session.execute(text("CREATE TABLE records_20250101 (LIKE records)"))
    maintain(database, NOON, RETENTION)
    assert existing(database, f"records_{OLD_DAY}")
    assert existing(database, "records_20250101")


def test_scraped_servers_are_forgotten_also_where_none_is_scraped_any_more(database: Database) -> None:
    """As after the last of the sources went out of the settings: they were `reporting` for good."""
    now = datetime.now(UTC)
    with database.session() as session:
        for server, hours in (("gone", 25), ("paused", 23)):
            at = now - timedelta(hours=hours)
            told = {"kind": "vllm", "url": "http://a:1/metrics", "condition": "reporting", "detail": ""}
            session.add(Source(server=server, since=at, scraped_at=at, interval_seconds=15.0, **told))
    maintain(database, now, RETENTION)
    with database.session() as session:
        assert [source.server for source in all_sources(session)] == ["paused"]


def test_one_sidecar_at_a_time_removes(database: Database) -> None:
    store(database, OLD)
    with retention._alone(database) as connection:
        assert connection is not None
        assert maintain(database, NOON, RETENTION).dropped == []
    assert len(maintain(database, NOON, RETENTION).dropped) == 2


def test_a_clock_that_is_ahead_of_the_databases_removes_nothing_before_its_time(database: Database) -> None:
    now = datetime.now(UTC)
    store(database, now, now - timedelta(days=40))
    day = now.astimezone(UTC).date()
    with capture_logs() as logs:
        dropped = maintain(database, now + timedelta(days=60), RETENTION).dropped
    assert (count(database, "records"), len(dropped)) == (2, 2)
    assert f"records_{day:%Y%m%d}" in partitions(database)
    (told,) = [each for each in logs if each["event"] == "retention_by_the_clock_of_the_database"]
    assert told["ahead_seconds"] == pytest.approx(60 * 86_400, abs=600)
