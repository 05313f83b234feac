"""A database of revision 0001 with incidents in it is upgraded, and they keep their place."""

from __future__ import annotations

from alembic import command
from sqlalchemy import text

from driftguard.store import incidents
from driftguard.store.database import Database
from driftguard.store.migrations import alembic_config
from driftguard.store.tables import ProbePrompt

_STREAM = """
    INSERT INTO streams (server, target, draft, draft_version, method, first_seen_at, last_seen_at)
    VALUES ('chat', 'target', 'draft', 'v1', 'draft_model', now(), now())
    """
_INCIDENT = """
    INSERT INTO incidents (id, stream_id, direction, state, severity, opened_at, opened_seq,
                           change_point_seq, change_point_at, interval_start_at, interval_end_at,
                           acceptance_before, acceptance_after, segments, evidence)
    SELECT gen_random_uuid(), id, 'down', 'open', 'critical', now(), 9, 5, now(), now(), now(), .7, .4,
           '[]', '{}' FROM streams
    """


def test_a_0001_database_with_an_incident_is_upgraded(empty_database_url: str) -> None:
    database = Database.open(empty_database_url)
    try:
        with database.engine.connect() as connection:
            command.upgrade(alembic_config(connection), "0001")
            for statement in (_STREAM, _INCIDENT):
                connection.execute(text(statement))
            connection.commit()
        database.upgrade()
        database.check_schema()
        with database.session() as session:
            ((incident, _),) = incidents.list_page(session, limit=10)
            assert incident.diagnosis is None
            assert incident.level_accepted is False
            assert session.get(ProbePrompt, ("chat", "key")) is None
    finally:
        database.close()
