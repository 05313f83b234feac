"""Daily partitions: made ahead, made on demand, dropped past retention."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

from sqlalchemy import text

from driftguard.settings import RetentionSettings
from driftguard.store.database import Database
from driftguard.store.partitions import existing_days, maintain
from driftguard.store.records import insert_batches
from driftguard.store.streams import StreamRegistry
from tests.store.samples import make_records

NOON = datetime(2026, 3, 10, 12, tzinfo=UTC)
RETENTION = RetentionSettings(records_days=30, rollups_days=60, captures_days=7, partitions_ahead=3)


def days(database: Database) -> set[date]:
    with database.session() as session:
        return existing_days(session)


def test_today_and_the_days_ahead_are_made_once(database: Database) -> None:
    with database.session() as session:
        first = maintain(session, NOON, RETENTION)
    with database.session() as session:
        second = maintain(session, NOON, RETENTION)
    assert first.created == [date(2026, 3, day) for day in (10, 11, 12, 13)]
    assert (second.created, second.dropped) == ([], [])


def test_late_records_get_their_partition(database: Database) -> None:
    late = make_records(3, ended_at=NOON - timedelta(days=20))
    with database.session() as session:
        insert_batches(session, [late], StreamRegistry(), NOON)
    assert days(database) == {date(2026, 2, 18)}


def test_a_record_lands_in_the_day_it_ended_in_utc(database: Database) -> None:
    just_before = datetime.fromisoformat("2026-03-11T01:59:59.999999+02:00")
    midnight = datetime.fromisoformat("2026-03-11T02:00:00+02:00")
    with database.session() as session:
        for number, moment in enumerate((just_before, midnight)):
            insert_batches(session, [make_records(1, seed=number, ended_at=moment)], StreamRegistry(), NOON)
        counts = {day: session.scalar(text(f"SELECT count(*) FROM records_202603{day}")) for day in (10, 11)}
    assert counts == {10: 1, 11: 1}


def test_only_days_wholly_past_retention_are_dropped(database: Database) -> None:
    edge = NOON - timedelta(days=30)
    with database.session() as session:
        for number, moment in enumerate((edge - timedelta(days=1), edge)):
            insert_batches(session, [make_records(2, seed=number, ended_at=moment)], StreamRegistry(), NOON)
    with database.session() as session:
        done = maintain(session, NOON, RETENTION)
    assert done.dropped == [(edge - timedelta(days=1)).date()]
    assert edge.date() in days(database)
    with database.session() as session:
        assert session.scalar(text("SELECT count(*) FROM records")) == 2


def test_old_rollups_and_captures_are_removed(database: Database) -> None:
    old, recent = NOON - timedelta(days=61), NOON - timedelta(days=59)
    with database.session() as session:
        for number, moment in enumerate((old, recent)):
            insert_batches(session, [make_records(1, seed=number, ended_at=moment)], StreamRegistry(), NOON)
        for age in (8, 6):
            session.execute(
                text(
                    "INSERT INTO captures (record_id, server, target, draft_version, segment, captured_at, "
                    "prompt_token_ids, output_token_ids) VALUES (gen_random_uuid(), 's', 't', 'v', 'c', :at, "
                    "'{1}', '{2}')"
                ),
                {"at": NOON - timedelta(days=age)},
            )
    with database.session() as session:
        done = maintain(session, NOON, RETENTION)
    assert (done.rollups_deleted, done.captures_deleted) == (1, 1)


def test_a_reader_delays_dropping_but_not_the_partitions_ahead(database: Database) -> None:
    with database.session() as session:
        insert_batches(session, [make_records(1, ended_at=NOON - timedelta(days=40))], StreamRegistry(), NOON)
    with database.session() as reader:
        reader.execute(text("SELECT count(*) FROM records"))  # holds its lock until the end
        with database.session() as session:
            done = maintain(session, NOON, RETENTION)
    assert done.dropped == []
    assert date(2026, 3, 13) in days(database)
    with database.session() as session:
        assert maintain(session, NOON, RETENTION).dropped == [date(2026, 1, 29)]
