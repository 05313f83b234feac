"""The rollups of revision 0014 stay, in one partition, and are summed per hour and day."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest
from alembic import command
from sqlalchemy import text
from sqlalchemy.orm import Session

from driftguard.settings import RetentionSettings
from driftguard.store.database import Database
from driftguard.store.migrations import alembic_config
from driftguard.store.records import insert_batches
from driftguard.store.retention import maintain
from driftguard.store.streams import StreamRegistry
from tests.store.samples import make_records
from tests.store.test_partitions import partitions

LAST = datetime(2026, 3, 4, 12, 34, tzinfo=UTC)
RETENTION = RetentionSettings(partitions_ahead=1)
_STREAM = """
    INSERT INTO streams (server, target, draft, draft_version, method, first_seen_at, last_seen_at)
    VALUES ('server-1', 'target-1', 'draft-1', 'v1', 'draft_model', :last, :last)
    """
# Three minutes of each hour, over 70 days that begin in the year before.
_ROLLUPS = """
    INSERT INTO rollups_1m (minute, stream_id, segment, kind, records, steps, drafted, accepted, emitted,
      output_tokens, acceptance_buckets, time_per_output_token_sum, time_per_output_token_count,
      time_to_first_token_sum, time_to_first_token_count)
    SELECT minute, streams.id, segment, 'request', 2, 1, 4, 3, 4, 4,
      array_fill(0, ARRAY[14]) || 2 || array_fill(0, ARRAY[4]) || 1, 0.5, 1, 0.25, 1
    FROM streams, unnest(ARRAY['chat', 'code']) segment,
      generate_series(cast(:last AS timestamptz) - interval '70 days', :last, '1 hour') last,
      generate_series(last - interval '2 minutes', last, '1 minute') minute
    """
_SUMS = """
    SELECT sum(records), sum(drafted), sum(acceptance_buckets[15]), sum(acceptance_buckets[20]),
      sum(time_per_output_token_sum), sum(time_to_first_token_count), min(minute), max(minute), count(*)
    FROM {table} WHERE segment = 'chat'
    """


@pytest.fixture
def before(empty_database_url: str) -> Iterator[Database]:
    database = Database.open(empty_database_url)
    with database.engine.connect() as connection:
        command.upgrade(alembic_config(connection), "0014")
        connection.commit()
    yield database
    database.close()


def fill(session: Session) -> None:
    for statement in (_STREAM, _ROLLUPS):
        session.execute(text(statement), {"last": LAST})


def test_rollups_stay_and_are_summed_per_hour_and_day(before: Database) -> None:
    with before.session() as session:
        fill(session)
        old = session.execute(text(_SUMS.format(table="rollups_1m"))).one()
    before.upgrade()
    before.check_schema()
    with before.session() as session:
        minutes, hours, days = (
            session.execute(text(_SUMS.format(table=f"rollups_1{tier}"))).one() for tier in "mhd"
        )
    assert minutes == old
    assert hours[:6] == days[:6] == old[:6]
    first = LAST - timedelta(days=70, minutes=2)
    assert hours[6:] == (first.replace(minute=0), LAST.replace(minute=0), 70 * 24 + 1)
    assert days[6:] == (first.replace(hour=0, minute=0), LAST.replace(hour=0, minute=0), 71)
    assert partitions(before, "rollups_1m") == ["rollups_1m_until_20260305"]
    assert partitions(before, "rollups_1d") == ["rollups_1d_2025", "rollups_1d_2026"]


def test_ingest_goes_on_in_the_old_partition_and_after_it(before: Database) -> None:
    with before.session() as session:
        fill(session)
    before.upgrade()
    moments = (LAST - timedelta(days=20), LAST, LAST + timedelta(days=1))
    with before.session() as session:
        old = session.scalar(text("SELECT sum(records) FROM rollups_1m"))
        for number, moment in enumerate(moments):
            batch = make_records(2, seed=number, ended_at=moment)
            insert_batches(session, [batch], StreamRegistry(), LAST)
        for tier in "mhd":
            assert session.scalar(text(f"SELECT sum(records) FROM rollups_1{tier}")) == old + 6
    assert partitions(before, "rollups_1m") == ["rollups_1m_20260305", "rollups_1m_until_20260305"]


def test_the_old_partition_goes_when_all_of_it_is_past_retention(before: Database) -> None:
    with before.session() as session:
        fill(session)
    before.upgrade()
    assert maintain(before, LAST + timedelta(days=35), RETENTION).dropped == []
    done = maintain(before, LAST + timedelta(days=36), RETENTION)
    assert done.dropped == ["rollups_1m_until_20260305"]
    with before.session() as session:
        assert session.scalar(text("SELECT count(*) FROM rollups_1m")) == 0
        assert session.scalar(text("SELECT count(*) FROM rollups_1h")) == 2 * (70 * 24 + 1)


def test_a_database_without_rollups_has_no_old_partition(before: Database) -> None:
    before.upgrade()
    before.check_schema()
    assert partitions(before, "rollups_1m") == []
