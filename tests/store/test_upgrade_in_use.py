"""`driftguard db upgrade` while others use the tables."""

from __future__ import annotations

import threading

import pytest
from alembic import command
from sqlalchemy import text
from structlog.testing import capture_logs

from driftguard.store import migrations
from driftguard.store.database import INGEST, UPGRADE, Database
from tests.alerting.http_receiver import wait_until


def test_an_upgrade_that_waits_for_a_long_reader_lets_records_pass(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A backup reads for an hour: behind an upgrade that waited for it, nothing could be stored."""
    monkeypatch.setattr(migrations, "LOCK_SECONDS", 0.5)
    monkeypatch.setattr(migrations, "PAUSE_SECONDS", 0.5)
    database = Database.open(empty_database_url)
    with database.engine.connect() as connection:
        command.upgrade(migrations.alembic_config(connection), "0025")
        connection.commit()
    upgrading = threading.Thread(target=database.upgrade)
    try:
        with capture_logs() as logs, database.engine.connect() as reader:
            reader.execute(text("SET application_name = 'nightly backup'"))
            reader.commit()
            reader.execute(text("SELECT count(*) FROM records"))
            upgrading.start()
            wait_until(lambda: [one["event"] for one in logs].count("upgrade_waits") >= 2, "two attempts")
            for _ in range(3):
                with database.connect(INGEST) as writer:
                    writer.execute(text("LOCK TABLE records IN ROW EXCLUSIVE MODE"))
            assert upgrading.is_alive()
            assert "(nightly backup), open for 0:00:0" in logs[0]["for_transactions"][0]
            reader.rollback()
            upgrading.join(60)
        database.check_schema()
    finally:
        database.close()


def test_an_upgrade_that_is_cancelled_for_a_deadlock_tries_again(
    empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a sidecar of the old version that still runs: it reads tables in another order."""
    monkeypatch.setattr(migrations, "LOCK_SECONDS", 60)
    monkeypatch.setattr(migrations, "PAUSE_SECONDS", 0.5)
    database = Database.open(f"{empty_database_url}&options=-cdeadlock_timeout%3D5s")
    with database.engine.connect() as connection:
        command.upgrade(migrations.alembic_config(connection), "0025")
        connection.commit()
    upgrading = threading.Thread(target=database.upgrade)
    waits = text("SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'server_versions'::regclass")
    try:
        with capture_logs() as logs, database.connect(UPGRADE) as reader, database.connect() as other:
            reader.execute(text("SET deadlock_timeout = '10min'"))  # the upgrade is cancelled, not this
            reader.commit()
            reader.execute(text("SELECT count(*) FROM server_versions"))
            upgrading.start()
            wait_until(lambda: other.scalar(waits) == 1, "the upgrade to wait with a lock on records")
            reader.execute(text("SELECT count(*) FROM records"))
            reader.rollback()
            upgrading.join(60)
        assert "upgrade_waits" in [one["event"] for one in logs]
        database.check_schema()
    finally:
        database.close()
