"""A fleet of any size, copied in the database from one stream that the pipeline has folded."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from sqlalchemy import text

from driftguard.detection import DetectorConfig
from driftguard.incidents import cost_measurement
from driftguard.incidents.opening import NOBODY
from driftguard.metrics import Metrics
from driftguard.pipeline.fold_loop import Pipeline
from driftguard.store.database import Database
from driftguard.store.partitions import ensure_days
from tests.pipeline.traffic import Traffic, store

SILENT_FOR = timedelta(minutes=30)
# Server 0 is the folded one. Every second is silent: since half an hour, then one second longer each.
_STREAMS = """
    INSERT INTO streams (server, target, draft, draft_version, method, first_seen_at, last_seen_at,
                         traffic_arrived_at, traffic_ended_at)
    SELECT 'server-' || n, target, draft, draft_version, method, first_seen_at, heard, heard, heard
    FROM streams, generate_series(1, :count) AS n,
         LATERAL (SELECT :now - CASE n % 2 WHEN 0 THEN make_interval(secs => n % 60)
                                ELSE :silent_for + make_interval(secs => n) END AS heard) AS moment
    WHERE server = 'chat'
    ON CONFLICT DO NOTHING
    """
_COPIES = (
    """
    INSERT INTO segments (stream_id, segment, first_seen_at)
    SELECT copy.id, segment, segments.first_seen_at
    FROM segments JOIN streams ON streams.id = stream_id, streams AS copy
    WHERE streams.server = 'chat' AND copy.server <> 'chat'
    ON CONFLICT DO NOTHING
    """,
    """
    INSERT INTO detector_states (stream_id, state, history_rows, summary, updated_at, fold)
    SELECT copy.id, state, history_rows, summary, updated_at, fold
    FROM detector_states JOIN streams ON streams.id = stream_id, streams AS copy
    WHERE streams.server = 'chat' AND copy.server <> 'chat'
    ON CONFLICT DO NOTHING
    """,
    """
    INSERT INTO stream_costs (stream_id, measured_at, cost)
    SELECT copy.id, measured_at, cost
    FROM stream_costs JOIN streams ON streams.id = stream_id, streams AS copy
    WHERE streams.server = 'chat' AND copy.server <> 'chat'
    ON CONFLICT DO NOTHING
    """,
)
_ROLLUPS = """
    INSERT INTO rollups_1m (minute, stream_id, segment, kind, records, steps, drafted, accepted, emitted,
      output_tokens, acceptance_buckets, time_per_output_token_sum, time_per_output_token_count,
      time_to_first_token_sum, time_to_first_token_count)
    SELECT DISTINCT date_trunc('minute', last_seen_at - ago * interval '1 minute'), id, segment, 'request',
           20, 400, 1600, 1200, 1600, 1600, '{}'::bigint[], 0.4, 20, 0, 0
    FROM streams, unnest(ARRAY['code', 'german']) AS segment,
         generate_series(0, :minutes, :minutes_apart) AS ago
    WHERE server <> 'chat'
    ON CONFLICT DO NOTHING
    """


def populate(database: Database, streams: int, *, minutes_apart: int = 1) -> None:
    """Makes it so many streams of two segments, every second of them silent for half an hour to a few hours,
    with three hours of rollups each."""
    now = datetime.now(UTC)
    with database.session() as session:
        is_empty = session.scalar(text("SELECT count(*) FROM streams")) == 0
    if is_empty:
        _fold_one(database, now)
    with database.session() as session:
        session.execute(text(_STREAMS), {"count": streams - 1, "now": now, "silent_for": SILENT_FOR})
        for statement in _COPIES:
            session.execute(text(statement))
        heard = session.scalars(text("SELECT min(last_seen_at) FROM streams")).one()
        ensure_days(session, {heard.date() - timedelta(days=1), heard.date(), now.date()})
        session.execute(text(_ROLLUPS), {"minutes": 180, "minutes_apart": minutes_apart})
        session.execute(text("ANALYZE"))


def _fold_one(database: Database, now: datetime) -> None:
    traffic = Traffic(seed=41, start=now - timedelta(minutes=20))
    store(database, traffic.draw(1_000, {"code": 0.75, "german": 0.7}))
    while Pipeline(database, DetectorConfig(minimum_drop=0.1), Metrics()).fold_batch():
        pass
    cost_measurement.refresh(database, NOBODY, now)
