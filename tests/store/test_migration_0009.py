"""An incident that was announced before revision 0009 keeps its alert; what was told is not told again."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from alembic import command
from sqlalchemy import text

from driftguard.alerting.destination import webhooks
from driftguard.store import incidents, notifications
from driftguard.store.database import Database
from driftguard.store.migrations import alembic_config

OPENED_AT = datetime(2026, 3, 4, 12, tzinfo=UTC)
_STREAM = """
    INSERT INTO streams (server, target, draft, draft_version, method, first_seen_at, last_seen_at)
    VALUES ('chat', 'target', 'draft', 'v1', 'draft_model', now(), now())
    """
_INCIDENT = """
    INSERT INTO incidents (id, stream_id, direction, state, severity, opened_at, opened_seq,
                           change_point_seq, change_point_at, interval_start_at, interval_end_at,
                           acceptance_before, acceptance_after, segments, evidence)
    SELECT gen_random_uuid(), id, 'down', 'acknowledged', 'critical', :at, 9, 5, now(), now(), now(), .7, .4,
           '[]', '{}' FROM streams
    """
_HISTORY = """
    INSERT INTO incident_transitions (incident_id, from_state, to_state, reason, at)
    SELECT id, before, after, 'because', :at FROM incidents,
           (VALUES (NULL, 'open'), ('open', 'acknowledged')) AS steps (before, after)
    """
_TOLD = """
    INSERT INTO notifications (incident_id, destination, event, created_at, delivered_at)
    SELECT id, 'webhook:http://pager', 'firing', :at, :at FROM incidents
    """


def test_an_announced_incident_keeps_its_alert(empty_database_url: str) -> None:
    database = Database.open(empty_database_url)
    try:
        with database.engine.connect() as connection:
            command.upgrade(alembic_config(connection), "0008")
            for statement in (_STREAM, _INCIDENT, _HISTORY, _TOLD):
                connection.execute(text(statement), {"at": OPENED_AT})
            connection.commit()
        database.upgrade()
        database.check_schema()
        hooks = webhooks(["http://pager"])
        with database.session() as session:
            ((incident, _),) = incidents.list_page(session, limit=10)
            assert incidents.severities(session, [incident.id])[incident.id] == [("critical", OPENED_AT)]
            incidents.announce(session, incident.id, hooks, "firing", incident.severity, OPENED_AT)
            assert notifications.claim(session, hooks[0], timedelta(seconds=1)) is None
            incidents.move(session, incident.id, "resolved", "it is over", datetime.now(UTC))
            claimed = notifications.claim(session, hooks[0], timedelta(seconds=1))
            assert claimed is not None
            assert claimed.event == "resolved"
    finally:
        database.close()
