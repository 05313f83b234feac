"""The retrainings of years, whose documents are large."""

from __future__ import annotations

from sqlalchemy import text

from driftguard.store.database import Database

SERVERS = 5
# Of every server one run a day, on which the gate decided. Every third candidate was promoted, and the newest
# one is in service.
_RUNS = """
    INSERT INTO retrain_runs (id, server, target, trigger, state, started_at, ended_at, parent_version,
                              candidate_version, numbers)
    SELECT gen_random_uuid(), 'server-' || n, 'target', 'nightly',
           CASE day % 3 WHEN 0 THEN 'promoted' ELSE 'rejected' END, at, at,
           'v' || day / 3 * 3 + 3, 'v' || day,
           jsonb_build_object('gate', NULL, 'checksums_sha256', (
               SELECT string_agg(gen_random_uuid()::text, '') FROM generate_series(1, :uuids)))
    FROM generate_series(1, :servers) AS n, generate_series(0, :days - 1) AS day,
         LATERAL (SELECT now() - day * interval '1 day' AS at) AS moment
    """
_DRAFTS = """
    INSERT INTO drafts (server, target, version, name, method, parent_version, state, created_at,
                        retrain_run_id)
    SELECT server, target, candidate_version, candidate_version, 'draft_model', parent_version,
           CASE WHEN candidate_version = 'v0' THEN 'in_service' WHEN state = 'promoted' THEN 'retired'
                ELSE state END, started_at, id
    FROM retrain_runs
    """


def populate(database: Database, *, days: int, kilobytes: int) -> None:
    """`kilobytes`: of the document of each run."""
    with database.session() as session:
        session.execute(text(_RUNS), {"servers": SERVERS, "days": days, "uuids": 28 * kilobytes})
        session.execute(text(_DRAFTS))
    with database.engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        connection.execute(text("VACUUM ANALYZE drafts, retrain_runs"))
