"""`driftguard db upgrade` while others use the tables."""

from __future__ import annotations

import subprocess
import sys
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


def test_an_upgrade_that_waits_for_another_says_so(empty_database_url: str) -> None:
    """As that of a pod whose predecessor was killed in the middle of it: its log was empty for minutes."""
    database = Database.open(empty_database_url)
    upgrading = threading.Thread(target=database.upgrade)
    try:
        with capture_logs() as logs, database.connect(UPGRADE) as other:
            other.execute(text("SET application_name = 'the pod before'"))
            with migrations.only_one_upgrade(other):
                upgrading.start()
                wait_until(lambda: bool(logs), "a word about it")
                assert upgrading.is_alive()
            upgrading.join(60)
        (told,) = logs
        assert told["event"] == "upgrade_waits_for_another"
        assert "(the pod before)" in told["held_by"][0]
        database.check_schema()
    finally:
        database.close()


SLOW = """
import sys
from sqlalchemy import text
from driftguard.store import migrations
from driftguard.store.database import Database
slow = text("SELECT pg_sleep(600)")
migrations.command.upgrade = lambda config, _: config.attributes["connection"].execute(slow)
Database.open(sys.argv[1]).upgrade()
"""


def test_an_upgrade_that_was_killed_ends_in_the_database_too(empty_database_url: str) -> None:
    """Else the next one waits until its statement is done, and then does the same work once more."""
    sleeping = text("SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'SELECT pg_sleep%'")
    database = Database.open(empty_database_url)
    try:
        with database.connect() as looking, start(SLOW, empty_database_url) as killed:
            looking.execution_options(isolation_level="AUTOCOMMIT")
            wait_until(lambda: looking.scalar(sleeping) == 1, "the statement of a migration")
            killed.kill()
            wait_until(lambda: looking.scalar(sleeping) == 0, "its end")
        database.upgrade()
        database.check_schema()
    finally:
        database.close()


def start(program: str, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", program, *arguments])
