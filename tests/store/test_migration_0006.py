"""Streams of a database of revision 0005 keep when they were last heard."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from alembic import command
from sqlalchemy import text

from driftguard.store import streams
from driftguard.store.database import Database
from driftguard.store.migrations import alembic_config

MINUTE = datetime(2026, 3, 4, 12, tzinfo=UTC)
_STREAMS = """
    INSERT INTO streams (server, target, draft, draft_version, method, first_seen_at, last_seen_at)
    SELECT name, 'target', 'draft', 'v1', 'draft_model', :at, :at
    FROM unnest(ARRAY['requests', 'probes only', 'nothing']) name
    """
_ROLLUPS = """
    INSERT INTO rollups_1m (minute, stream_id, segment, kind, records, steps, drafted, accepted, emitted,
      output_tokens, acceptance_buckets, time_per_output_token_sum, time_per_output_token_count,
      time_to_first_token_sum, time_to_first_token_count)
    SELECT :at, id, 'default', CASE server WHEN 'requests' THEN 'request' ELSE 'probe' END,
      1, 1, 4, 3, 4, 4, '{}', 0, 0, 0, 0
    FROM streams WHERE server <> 'nothing'
    """


def test_traffic_is_taken_to_have_arrived_as_it_ended(empty_database_url: str) -> None:
    database = Database.open(empty_database_url)
    try:
        with database.engine.connect() as connection:
            command.upgrade(alembic_config(connection), "0005")
            connection.execute(text(_STREAMS), {"at": MINUTE + timedelta(seconds=30)})
            connection.execute(text(_ROLLUPS), {"at": MINUTE})
            connection.commit()
        database.upgrade()
        with database.session() as session:
            found = {row.server: row for row in streams.all_streams(session)}
        heard = found["requests"]
        assert heard.traffic_arrived_at == heard.traffic_ended_at == MINUTE + timedelta(seconds=30)
        assert found["probes only"].traffic_arrived_at is None
        assert found["nothing"].traffic_arrived_at is None
    finally:
        database.close()
