"""Every tier of the rollups has every record, whenever it came; charts and exports read the right one."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta

import pytest
from sqlalchemy import text

from driftguard.records import AcceptanceRecord
from driftguard.records.positions import per_position
from driftguard.settings import RetentionSettings
from driftguard.store import export_rows, series
from driftguard.store.database import Database
from driftguard.store.records import insert_batches
from driftguard.store.retention import maintain
from driftguard.store.rollup_tiers import TIERS, Tier, coarsest
from driftguard.store.row_filter import RowFilter
from driftguard.store.streams import StreamRegistry, all_streams
from driftguard.store.tables import ACCEPTANCE_BUCKETS
from tests.store.samples import make_records

pytestmark = pytest.mark.slow

NOW = datetime(2026, 3, 1, 0, 30, tzinfo=UTC)  # in the first hour of a day and of a month
RETENTION = RetentionSettings(records_days=30, minute_rollups_days=32, rollups_days=400)
SUMS = ("steps", "drafted", "accepted", "emitted", "output_tokens")


def expected(
    records: Sequence[AcceptanceRecord], tier: Tier
) -> dict[tuple[datetime, str, str], Counter[str]]:
    found: dict[tuple[datetime, str, str], Counter[str]] = defaultdict(Counter)
    for record in records:
        sums = found[tier.start(record.ended_at), record.segment, record.kind]
        sums["records"] += 1
        for name in SUMS:
            sums[name] += getattr(record, name) or 0
        bucket = min(record.accepted * ACCEPTANCE_BUCKETS // record.drafted, ACCEPTANCE_BUCKETS - 1)
        sums[f"bucket {bucket}"] += 1
        told = per_position(record.steps, record.drafted_per_position, record.accepted_per_position)
        for place, (drafted, kept) in enumerate(told):
            sums[f"drafted {place}"] += drafted
            sums[f"accepted {place}"] += kept
    return found


def stored(database: Database, tier: Tier) -> dict[tuple[datetime, str, str], Counter[str]]:
    with database.session() as session:
        rows = export_rows.rollups(session, tier, RowFilter(), after=None, limit=100_000)
    return {
        (row.minute, row.segment, row.kind): Counter(
            {"records": row.records}
            | {name: getattr(row, name) for name in SUMS}
            | {f"bucket {place}": count for place, count in enumerate(row.acceptance_buckets) if count}
            | {f"drafted {place}": count for place, count in enumerate(row.drafted_per_position or ())}
            | {f"accepted {place}": count for place, count in enumerate(row.accepted_per_position or ())}
        )
        for _, row in rows
    }


def late_and_again(source: random.Random, now: datetime, seed: int) -> list[list[AcceptanceRecord]]:
    """Batches out of order in which records of the last 30 days come, some of them twice."""
    told: tuple[dict[str, object], ...] = (
        {},
        {"drafted_per_position": None},
        {"drafted_per_position": None, "accepted_per_position": None},
    )
    records = [
        make_records(1, seed=seed + number, segments=3, kind=kind, ended_at=now - age, **source.choice(told))[
            0
        ]
        for number in range(60)
        for age in [timedelta(days=30) * source.random() ** 4]
        for kind in [source.choice(("request", "request", "probe"))]
    ]
    repeated = source.choices(records, k=20)
    mixed = source.sample(records + repeated, 80)
    return [mixed[start : start + 16] for start in range(0, 80, 16)]


@pytest.mark.parametrize("seed", range(3))
def test_the_sums_of_each_tier_are_those_of_all_records_that_came(database: Database, seed: int) -> None:
    source = random.Random(seed)
    known = {}
    for number in range(6):  # maintenance runs, and ten days go by, between the batches
        now = NOW + timedelta(days=10 * number, minutes=source.randrange(1_000))
        for batch in late_and_again(source, now, 1_000 * (number + 6 * seed)):
            with database.session() as session:
                insert_batches(session, [batch], StreamRegistry(), now)
            known.update({record.record_id: record for record in batch})
        maintain(database, now, RETENTION)
    records = list(known.values())
    for tier in TIERS.values():
        of_records, of_tier = expected(records, tier), stored(database, tier)
        since = tier.kept_since(now, RETENTION)
        assert {key: sums for key, sums in of_tier.items() if key[0] >= since} == {
            key: sums for key, sums in of_records.items() if key[0] >= since
        }
    assert len(stored(database, TIERS["hour"])) == len(expected(records, TIERS["hour"]))
    assert len(stored(database, TIERS["minute"])) < len(expected(records, TIERS["minute"]))


@pytest.mark.parametrize(
    ("width", "resolution"),
    [(5, None), (60, "minute"), (900, "minute"), (3_600, "hour"), (21_600, "hour"), (86_400, "day")],
)
def test_bins_are_made_of_the_coarsest_tier_that_fits(width: int, resolution: str | None) -> None:
    tier = coarsest(width)
    assert (tier.resolution if tier else None) == resolution


@pytest.mark.parametrize(("width", "days"), [(60, 1), (3_600, 10), (21_600, 60), (86_400, 366)])
def test_a_chart_that_looks_back_past_a_tier_shows_all_records(
    database: Database, width: int, days: int
) -> None:
    ages = [age for age in (0.1, 0.9, 9.5, 36, 59, 100, 365) if age < days]
    with database.session() as session:
        for number, age in enumerate(ages):
            batch = make_records(3, seed=number, ended_at=NOW - timedelta(days=age))
            insert_batches(session, [batch], StreamRegistry(), NOW)
    maintain(database, NOW, RETENTION)
    with database.session() as session:
        (stream,) = all_streams(session)
        bins = series.bins(session, [stream.id], NOW - timedelta(days=days), NOW, width)
    assert sum(item.requests for item in bins) == 3 * len(ages)
    assert all(item.at.timestamp() % width == 0 for item in bins)


def test_the_day_in_which_a_chart_begins_counts_whole(database: Database) -> None:
    begin = NOW - timedelta(days=366)
    moments = (begin.replace(hour=0, minute=1), begin + timedelta(hours=1), begin - timedelta(hours=1))
    with database.session() as session:
        for number, moment in enumerate(moments):
            insert_batches(session, [make_records(1, seed=number, ended_at=moment)], StreamRegistry(), NOW)
        (stream,) = all_streams(session)
        bins = series.bins(session, [stream.id], begin, NOW, 86_400)
    assert sum(item.requests for item in bins) == 2
    assert {item.at for item in bins} == {begin.replace(hour=0, minute=0)}


def test_a_query_for_the_last_minutes_reads_the_partitions_of_these_days(database: Database) -> None:
    with database.session() as session:
        for age in range(5):
            batch = make_records(1, seed=age, ended_at=NOW - timedelta(days=age))
            insert_batches(session, [batch], StreamRegistry(), NOW)
        plan = "\n".join(
            session.scalars(
                text("EXPLAIN SELECT * FROM rollups_1m WHERE minute >= :since"),
                {"since": NOW - timedelta(hours=2)},
            )
        )
    assert [day for day in ("20260301", "20260228", "20260227") if f"rollups_1m_{day}" in plan] == [
        "20260301",
        "20260228",
    ]
