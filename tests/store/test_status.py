"""What the status reads, and how much of it: the plans on a hundred thousand rollups."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import event, text

from driftguard.store import status, streams
from driftguard.store.database import Database

LAST = datetime(2026, 3, 4, 12, tzinfo=UTC)
DAY = timedelta(days=1)
_STREAMS = """
    INSERT INTO streams (server, target, draft, draft_version, method, first_seen_at, last_seen_at)
    SELECT 'server-' || n, 'target', 'draft', 'v1', 'draft_model', now(), now() FROM generate_series(1, 35) n
    """
_ROLLUPS = """
    INSERT INTO rollups_1m (minute, stream_id, segment, kind, records, steps, drafted, accepted, emitted,
      output_tokens, acceptance_buckets, time_per_output_token_sum, time_per_output_token_count,
      time_to_first_token_sum, time_to_first_token_count)
    SELECT minute, streams.id, 'default', 'request', 1, 1, 4, 3, 4, 4, '{}', 0, 0, 0, 0
    FROM streams, generate_series(cast(:last AS timestamptz) - interval '2 days', :last, '1 minute') AS minute
    WHERE streams.server <> 'server-1' OR minute = :last
    """


@contextmanager
def statements(database: Database) -> Iterator[list[tuple[str, Any]]]:
    seen: list[tuple[str, Any]] = []

    def note(_c: Any, _cursor: Any, statement: str, parameters: Any, _context: Any, _many: bool) -> None:
        seen.append((statement, parameters))

    event.listen(database.engine, "before_cursor_execute", note)
    try:
        yield seen
    finally:
        event.remove(database.engine, "before_cursor_execute", note)


def blocks_read(plan: dict[str, Any]) -> int:
    return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])


def test_a_source_that_was_silent_a_day_ago_does_not_read_the_minutes_of_the_others(
    database: Database,
) -> None:
    with database.session() as session:
        session.execute(text(_STREAMS))
        session.execute(text(_ROLLUPS), {"last": LAST})
        session.execute(text("ANALYZE rollups_1m"))
        total = session.scalar(text("SELECT count(*) FROM rollups_1m")) or 0
        assert total > 97_000
        silent = next(row.id for row in streams.all_streams(session) if row.server == "server-1")
        day_ago = (LAST - DAY - timedelta(hours=2), LAST - DAY + timedelta(hours=2))
        with statements(database) as seen:
            assert status.active_minutes(session, [silent], LAST, *day_ago) == [LAST]
        assert len(seen) == 2
        driver = session.connection().connection.driver_connection
        assert driver is not None
        for statement, parameters in seen:
            row = driver.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {statement}", parameters)
            plan = row.fetchone()[0][0]["Plan"]
            assert blocks_read(plan) < 40, plan
