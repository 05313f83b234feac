"""Migration 0014: destinations lose the secrets of their addresses and stay the same places."""

from __future__ import annotations

from alembic import command
from sqlalchemy import text

from driftguard.alerting.destination import alertmanagers, webhooks
from driftguard.store.database import Database
from driftguard.store.migrations import alembic_config
from tests.store.test_migration_0009 import _INCIDENT as INCIDENT
from tests.store.test_migration_0009 import _STREAM as STREAM
from tests.store.test_migration_0009 import OPENED_AT

WEBHOOKS = [
    "https://hooks.slack.com/services/T000/B000/hunter2",
    "http://user:hunter2@10.0.0.1:8080/path?token=hunter2#hunter2",
    "http://user:p@ss:hunter2@[::1]:8080",
    "HTTPS://Example.com",
    "http://ünïcode.example/hunter2",
    "http://user:hunter2/x",
    "not an address hunter2",
    "",
]
ALERTMANAGERS = ["http://user:hunter2@alertmanager:9093", "http://alertmanager:9093/prefix"]
_TOLD = """
    INSERT INTO notifications (incident_id, destination, event, severity, created_at, last_error)
    SELECT id, :destination, 'firing', 'critical', :at, :destination || ' did not take it: HTTP 404'
    FROM incidents
    """
_JOB = "INSERT INTO procrastinate_jobs (queue_name, task_name) VALUES ('notifications', :task)"


def test_every_destination_keeps_its_identity_and_none_its_secret(empty_database_url: str) -> None:
    stored = [f"webhook:{url}" for url in WEBHOOKS] + [f"alertmanager:{url}" for url in ALERTMANAGERS]
    database = Database.open(empty_database_url)
    try:
        with database.engine.connect() as connection:
            command.upgrade(alembic_config(connection), "0013")
            for statement in (STREAM, INCIDENT):
                connection.execute(text(statement), {"at": OPENED_AT})
            for destination in stored:
                connection.execute(text(_TOLD), {"destination": destination, "at": OPENED_AT})
            for task in ("webhook:deliver", "retraining:retrain"):
                connection.execute(text(_JOB), {"task": task})
            connection.commit()
        database.upgrade()
        database.check_schema()
        with database.session() as session:
            rows = session.execute(
                text("SELECT destination, last_error FROM notifications ORDER BY id")
            ).all()
            tasks = session.scalars(text("SELECT task_name FROM procrastinate_jobs")).all()
    finally:
        database.close()
    assert [row.destination for row in rows] == webhooks(WEBHOOKS) + alertmanagers(ALERTMANAGERS)
    assert "hunter2" not in repr(rows)
    assert rows[0].last_error == "webhook:https://hooks.slack.com did not take it: HTTP 404"
    assert tasks == ["retraining:retrain"]
