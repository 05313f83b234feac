"""Migrations, and what an operator reads when the database does not fit."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from alembic import command
from sqlalchemy import text

from driftguard.errors import BadSettings, DatabaseUnavailable
from driftguard.store.database import Database, parse_url, upgrade
from driftguard.store.migrations import alembic_config, head_revision
from driftguard.store.retention import maintain
from driftguard.store.tables import Base
from tests.conftest import fresh_database
from tests.store.test_partitions import NOON, RETENTION


def test_migrations_and_tables_agree(database: Database) -> None:
    maintain(database, NOON, RETENTION)  # partitions must not look like tables to remove
    with database.engine.connect() as connection:
        command.check(alembic_config(connection))


def test_the_check_notices_a_difference(database: Database) -> None:
    with database.session() as session:
        session.execute(text("ALTER TABLE streams DROP COLUMN records_in_other"))
    with database.engine.connect() as connection, pytest.raises(Exception, match="records_in_other"):
        command.check(alembic_config(connection))


def test_an_empty_database_is_behind_and_upgrade_mends_it(empty_database_url: str) -> None:
    database = Database.open(empty_database_url)
    with pytest.raises(DatabaseUnavailable, match=r"no DriftGuard schema yet.*`driftguard db upgrade`"):
        database.check_schema()
    database.upgrade()
    database.check_schema()
    database.close()


def test_an_older_revision_is_behind(database: Database) -> None:
    with database.session() as session:
        session.execute(text("DELETE FROM alembic_version"))
    with pytest.raises(DatabaseUnavailable, match=f"this version needs {head_revision()}"):
        database.check_schema()


def test_an_unknown_revision_is_ahead_and_is_never_touched(database: Database) -> None:
    with database.session() as session:
        session.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    for attempt in (database.check_schema, database.upgrade):
        with pytest.raises(DatabaseUnavailable, match=r"9999, which is newer than this version knows"):
            attempt()


def test_upgrades_at_the_same_time_wait_for_each_other(empty_database_url: str) -> None:
    with ThreadPoolExecutor(4) as threads:
        for outcome in [threads.submit(upgrade, empty_database_url) for _ in range(4)]:
            outcome.result()
    database = Database.open(empty_database_url)
    database.check_schema()
    database.close()


def test_every_table_exists(database: Database) -> None:
    with database.session() as session:
        found = set(session.scalars(text("SELECT tablename FROM pg_tables WHERE schemaname = 'public'")))
    assert set(Base.metadata.tables) | {"procrastinate_jobs"} <= found


def test_an_unreachable_database_is_named_without_its_password() -> None:
    database = Database.open("postgresql://me:hunter2@127.0.0.1:1/traffic")
    with pytest.raises(DatabaseUnavailable) as caught:
        database.check_schema()
    assert "database 'traffic' at 127.0.0.1:1" in caught.value.detail
    assert "refused" in caught.value.detail
    assert "hunter2" not in caught.value.detail


def test_a_database_that_is_not_in_utf8_is_refused(postgres_server: str) -> None:
    """It would give some text back as bytes."""
    encoded = "template0 ENCODING 'SQL_ASCII' LOCALE 'C'"
    with contextmanager(fresh_database)(postgres_server, encoded) as url:
        database = Database.open(url)
        with pytest.raises(BadSettings, match=r"encoded in SQL_ASCII.*ENCODING 'UTF8'"):
            database.upgrade()
        database.close()


@pytest.mark.parametrize("url", ["postgres://h/d", "postgresql://h/d", "postgresql+psycopg://h/d"])
def test_usual_urls_are_accepted(url: str) -> None:
    assert parse_url(url).drivername == "postgresql+psycopg"


@pytest.mark.parametrize("url", ["mysql://me:hunter2@h/d", "sqlite:///x.db", "not a url", ""])
def test_other_urls_are_refused_without_showing_them(url: str) -> None:
    with pytest.raises(BadSettings, match="database_url") as caught:
        Database.open(url)
    assert "hunter2" not in caught.value.detail


def test_times_come_back_in_utc(database: Database) -> None:
    with database.session() as session:
        assert session.scalar(text("SHOW timezone")) == "UTC"
