"""Partitions: made ahead, and made on demand."""

from __future__ import annotations

from datetime import UTC, date, datetime, timedelta

import pytest
from sqlalchemy import text

from driftguard.settings import RetentionSettings
from driftguard.store.database import Database
from driftguard.store.partitions import MINUTES, OF_TIERS, PartitionedTable, missing_for
from driftguard.store.records import insert_batches
from driftguard.store.retention import create_ahead
from driftguard.store.streams import StreamRegistry
from tests.store.samples import make_records

NOON = datetime(2026, 3, 10, 12, tzinfo=UTC)
RETENTION = RetentionSettings(records_days=30, rollups_days=60, captures_days=7, partitions_ahead=3)


def partitions(database: Database, table: str = "records") -> list[str]:
    with database.session() as session:
        attached = (
            "SELECT inhrelid::regclass::text FROM pg_inherits WHERE inhparent = CAST(:table AS regclass)"
        )
        return sorted(session.scalars(text(attached), {"table": table}))


@pytest.mark.parametrize(
    ("table", "day", "name", "start", "end"),
    [
        (MINUTES, date(2024, 2, 29), "rollups_1m_20240229", date(2024, 2, 29), date(2024, 3, 1)),
        (OF_TIERS["hour"], date(2026, 12, 31), "rollups_1h_202612", date(2026, 12, 1), date(2027, 1, 1)),
        (OF_TIERS["hour"], date(2026, 2, 1), "rollups_1h_202602", date(2026, 2, 1), date(2026, 3, 1)),
        (OF_TIERS["day"], date(2024, 2, 29), "rollups_1d_2024", date(2024, 1, 1), date(2025, 1, 1)),
    ],
)
def test_a_day_lies_in_one_partition_and_its_name_tells_its_end(
    table: PartitionedTable, day: date, name: str, start: date, end: date
) -> None:
    found = table.partition(day)
    assert (found.name, found.start, found.end) == (name, start, end)
    assert table.end_of(name) == end


@pytest.mark.parametrize("name", ["rollups_1m_backup", "rollups_1m_20261345", "rollups_1h_202601", "other"])
def test_the_names_of_other_tables_tell_nothing(name: str) -> None:
    assert MINUTES.end_of(name) is None


def test_today_and_the_days_ahead_are_made_once(database: Database) -> None:
    new_year = datetime(2026, 12, 30, 23, 59, tzinfo=UTC)
    first, second = (create_ahead(database, new_year, 3) for _ in range(2))
    days = ("20261230", "20261231", "20270101", "20270102")
    assert sorted(first) == sorted(
        [f"{table}_{day}" for table in ("records", "rollups_1m") for day in days]
        + ["rollups_1h_202612", "rollups_1h_202701", "rollups_1d_2026", "rollups_1d_2027"]
    )
    assert second == []


def test_late_records_get_their_partitions(database: Database) -> None:
    late = make_records(3, ended_at=NOON - timedelta(days=20))
    with database.session() as session:
        insert_batches(session, [late], StreamRegistry(), NOON)
    made = [partitions(database, table) for table in ("records", "rollups_1m", "rollups_1h", "rollups_1d")]
    assert made == [["records_20260218"], ["rollups_1m_20260218"], ["rollups_1h_202602"], ["rollups_1d_2026"]]


def test_only_what_is_not_there_is_missing(database: Database) -> None:
    create_ahead(database, NOON, 3)
    with database.session() as session:
        assert missing_for(session, [NOON.date() + timedelta(days=ahead) for ahead in range(4)]) == []
        missing = [part.name for part in missing_for(session, [NOON.date() + timedelta(days=4)])]
    assert missing == ["records_20260314", "rollups_1m_20260314"]


def test_a_record_lands_in_the_day_it_ended_in_utc(database: Database) -> None:
    just_before = datetime.fromisoformat("2026-03-11T01:59:59.999999+02:00")
    midnight = datetime.fromisoformat("2026-03-11T02:00:00+02:00")
    with database.session() as session:
        for number, moment in enumerate((just_before, midnight)):
            insert_batches(session, [make_records(1, seed=number, ended_at=moment)], StreamRegistry(), NOON)
        for table in ("records", "rollups_1m"):
            counts = {
                day: session.scalar(text(f"SELECT count(*) FROM {table}_202603{day}")) for day in (10, 11)
            }
            assert counts == {10: 1, 11: 1}
        days = session.scalars(text("SELECT minute FROM rollups_1d ORDER BY 1")).all()
    assert days == [datetime(2026, 3, day, tzinfo=UTC) for day in (10, 11)]
