"""Migration 0026: records of before do not tell how they were verified."""

from __future__ import annotations

from alembic import command
from sqlalchemy import text

from driftguard.store.database import Database
from driftguard.store.folding import read_after
from driftguard.store.migrations import alembic_config

_RECORDS = """
    CREATE TABLE records_then PARTITION OF records
        FOR VALUES FROM ('2026-01-01 00:00Z') TO ('2026-01-02 00:00Z');
    INSERT INTO records (seq, record_id, ended_at, stream_id, kind, started_at, segment, steps, drafted,
        accepted, emitted, acceptance_rule, fidelity)
    SELECT n, gen_random_uuid(), '2026-01-01 12:00Z', 1, 'request', '2026-01-01 12:00Z', 'default', 1, 4,
        3, 4, (ARRAY['rejection', 'greedy', 'unknown'])[n], 'request'
    FROM generate_series(1, 3) AS n
    """


def test_stored_records_are_kept_and_tell_no_verification(empty_database_url: str) -> None:
    database = Database.open(empty_database_url)
    try:
        with database.engine.connect() as connection:
            command.upgrade(alembic_config(connection), "0025")
            connection.execute(text(_RECORDS))
            connection.commit()
        database.upgrade()
        with database.session() as session:
            kept = [(one.acceptance_rule, one.verification) for one in read_after(session, 0, limit=9)]
    finally:
        database.close()
    assert kept == [("rejection", "unknown"), ("greedy", "unknown"), ("unknown", "unknown")]
