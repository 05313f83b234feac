"""The usual silence, asked of the database, against its definition."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
from sqlalchemy import insert, text

from driftguard.status.staleness import USUAL_SPANS
from driftguard.store import silences
from driftguard.store.database import Database
from driftguard.store.partitions import ensure_days
from driftguard.store.silences import Source
from driftguard.store.tables import Rollup
from tests.status.silences import longest_silence

LAST = datetime(2026, 3, 10, 12, 0, 17, tzinfo=UTC)
MINUTE, HOUR, DAY = timedelta(minutes=1), timedelta(hours=1), timedelta(days=1)
_ROLLUPS = """
    INSERT INTO rollups_1m (minute, stream_id, segment, kind, records, steps, drafted, accepted, emitted,
      output_tokens, acceptance_buckets, time_per_output_token_sum, time_per_output_token_count,
      time_to_first_token_sum, time_to_first_token_count)
    SELECT minute, stream_id, 'default', 'request', 1, 1, 4, 3, 4, 4, '{}', 0, 0, 0, 0
    FROM generate_series(1, 35) AS stream_id,
         generate_series(cast(:last AS timestamptz) - interval '2 days', :last, '1 minute') AS minute
    WHERE stream_id <> 1 OR minute = :last
    """


def row(minute: datetime, stream_id: int, segment: str = "default", kind: str = "request") -> dict[str, Any]:
    counts = ("records", "steps", "drafted", "accepted", "emitted", "output_tokens")
    times = ("time_per_output_token", "time_to_first_token")
    return {
        **dict.fromkeys(counts, 1),
        **dict.fromkeys([f"{name}_{part}" for name in times for part in ("sum", "count")], 0),
        "acceptance_buckets": [],
        "minute": minute,
        "stream_id": stream_id,
        "segment": segment,
        "kind": kind,
    }


def arrivals(random: np.random.Generator) -> list[datetime]:
    """Up to nine days back: at random moments, with idle nights, or in bursts; some before every span, some
    on the very edge of one; some after the last record, by a clock that was put back."""
    style, count = random.integers(4), int(random.integers(1, 60))
    back = random.uniform(-30, 9 * 24 * 60, size=count)
    if style == 1:
        back = back[back % (24 * 60) < 8 * 60]
    if style == 2:
        back = np.concatenate([start + np.arange(10) * random.uniform(0.2, 7) for start in back])
    minutes = [(LAST - MINUTE * float(ago)).replace(second=0, microsecond=0) for ago in back]
    edges = [LAST.replace(second=0) - edge for span in USUAL_SPANS.items() for edge in span]
    return [*minutes, *(edge for edge in edges if random.random() < 0.2)]


def test_it_is_what_its_definition_says_for_sources_of_every_kind(database: Database) -> None:
    """Of several streams each, with probes between that are no traffic; seed 82."""
    random = np.random.default_rng(82)
    rows: dict[tuple[datetime, int, str, str], dict[str, Any]] = {}
    asked: list[Source] = []
    expected: list[timedelta] = []
    for number in range(150):
        ids = tuple(range(10 * number, 10 * number + int(random.integers(1, 4))))
        active: set[datetime] = set()
        for stream_id in ids:
            for minute in arrivals(random):
                segment, kind = f"s{random.integers(3)}", "probe" if random.random() < 0.2 else "request"
                rows[minute, stream_id, segment, kind] = row(minute, stream_id, segment, kind)
                active |= {minute} if kind == "request" else set()
        asked.append(Source(ids, LAST))
        expected.append(longest_silence(_until(active, LAST), LAST))
    with database.session() as session:
        ensure_days(session, {minute.date() for minute, *_ in rows})
        session.execute(insert(Rollup), list(rows.values()))
        found = silences.longest(session, asked, USUAL_SPANS)
    assert found == expected
    assert len(set(expected)) > 60  # they differ


def _until(minutes: set[datetime], last: datetime) -> Sequence[datetime]:
    return sorted(minute for minute in minutes if minute <= last)


def test_a_source_that_was_silent_a_day_ago_does_not_read_the_minutes_of_the_others(
    database: Database,
) -> None:
    """The plan on a hundred thousand rollups."""
    last = datetime(2026, 3, 4, 12, tzinfo=UTC)
    with database.session() as session:
        ensure_days(session, [last.date() - age * DAY for age in range(3)])
        session.execute(text(_ROLLUPS), {"last": last})
        session.execute(text("ANALYZE rollups_1m"))
        assert (session.scalar(text("SELECT count(*) FROM rollups_1m")) or 0) > 97_000
        asked = [Source((1,), last)]
        assert silences.longest(session, asked, USUAL_SPANS) == [timedelta()]
        statement, values = silences.statement(asked, USUAL_SPANS)
        explained = text(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement.text}")
        plan = session.execute(explained, values).scalar_one()[0]["Plan"]
    assert int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"]) < 40, plan
