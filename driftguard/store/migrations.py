"""Running alembic from the program: no alembic.ini, the same in a source checkout and in a wheel."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import structlog
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from psycopg.errors import DeadlockDetected, InvalidParameterValue, LockNotAvailable
from sqlalchemy import Connection, text
from sqlalchemy.exc import DBAPIError

from driftguard.errors import DatabaseUnavailable

_log = structlog.get_logger(__name__)
_UPGRADE_LOCK = 0x6472696674_01  # "drift" + 1: one upgrade at a time
LOCK_SECONDS: Final = 3  # less than records wait to be stored
PAUSE_SECONDS: Final = 2.0  # for what has waited behind the upgrade
CLIENT_CHECK_SECONDS: Final = 5
_OPEN_TRANSACTIONS = text(
    "SELECT pid, application_name, date_trunc('second', now() - xact_start) FROM pg_stat_activity"
    " WHERE datname = current_database() AND pid <> pg_backend_pid()"
    " AND xact_start < now() - make_interval(secs => :seconds) ORDER BY xact_start"
)
_HOLDERS = text(
    "SELECT pid, application_name, date_trunc('second', now() - coalesce(xact_start, state_change))"
    " FROM pg_stat_activity JOIN pg_locks USING (pid)"
    " WHERE locktype = 'advisory' AND granted AND datname = current_database()"
    " AND (classid::bigint << 32) + objid::bigint = :key AND objsubid = 1"
)


def migrations_directory() -> Path:
    """`driftguard/_migrations` in a wheel, `migrations` beside the package in a source checkout."""
    package = Path(__file__).parents[1]
    packaged = package / "_migrations"
    return packaged if packaged.is_dir() else package.parent / "migrations"


def alembic_config(connection: Connection | None = None) -> Config:
    """A Config that runs on `connection`; env.py reads DRIFTGUARD_DATABASE_URL when there is none."""
    config = Config()
    config.set_main_option("script_location", str(migrations_directory()).replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    config.attributes["connection"] = connection
    return config


def head_revision() -> str:
    """The newest revision that this version of the code knows."""
    head = ScriptDirectory.from_config(alembic_config()).get_current_head()
    if head is None:
        raise RuntimeError(f"no migrations in {migrations_directory()}")
    return head


def check_revision(connection: Connection, *, place: str) -> None:
    """Raises DatabaseUnavailable when the schema is behind or ahead of this version."""
    head = head_revision()
    current = _current_revision(connection)
    if current == head:
        return
    _refuse_ahead(current, head, place)
    state = f"is at revision {current}" if current else "has no DriftGuard schema yet"
    raise DatabaseUnavailable(
        f"{place} {state}, this version needs {head}: run `driftguard db upgrade`",
        current_revision=current,
        needed_revision=head,
    )


def run_upgrade(connection: Connection, *, place: str) -> None:
    """Upgrades to the head revision.

    Where a table is in use it waits for LOCK_SECONDS, steps back, so that what has queued behind it goes on,
    and tries again, as often as it takes. Raises DatabaseUnavailable when the database is ahead.
    """
    with only_one_upgrade(connection):
        _refuse_ahead(_current_revision(connection), head_revision(), place)
        while not _upgraded(connection):
            _log.warning("upgrade_waits", for_transactions=_open_transactions(connection))
            time.sleep(PAUSE_SECONDS)


@contextmanager
def only_one_upgrade(connection: Connection) -> Iterator[None]:
    """Waits for another that is at it, and says so. Where this process is killed, its statement ends too."""
    _end_with_this_process(connection)
    if not connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), {"key": _UPGRADE_LOCK}):
        held_by = connection.execute(_HOLDERS, {"key": _UPGRADE_LOCK}).all()
        _log.warning("upgrade_waits_for_another", held_by=_told(held_by))
        connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _UPGRADE_LOCK})
    connection.execute(text(f"SET lock_timeout = '{LOCK_SECONDS}s'"))
    connection.commit()
    try:
        yield
    finally:
        connection.rollback()
        connection.execute(text("RESET lock_timeout"))
        connection.execute(text("RESET client_connection_check_interval"))
        connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": _UPGRADE_LOCK})
        connection.commit()


def _end_with_this_process(connection: Connection) -> None:
    """Else PostgreSQL notices only when a statement is done, as after minutes, that nobody waits for it."""
    try:
        connection.execute(text(f"SET client_connection_check_interval = '{CLIENT_CHECK_SECONDS}s'"))
        connection.commit()
    except DBAPIError as error:
        if not isinstance(error.orig, InvalidParameterValue):  # the server's system cannot tell
            raise
        connection.rollback()


def _upgraded(connection: Connection) -> bool:
    """False, with nothing changed, where another transaction kept a lock, or also waited for one of ours."""
    try:
        command.upgrade(alembic_config(connection), "head")
        connection.commit()
    except DBAPIError as error:
        if not isinstance(error.orig, (LockNotAvailable, DeadlockDetected)):
            raise
        connection.rollback()
        return False
    return True


def _open_transactions(connection: Connection) -> list[str]:
    """The others of this database that have been open for longer than the upgrade has waited."""
    rows = connection.execute(_OPEN_TRANSACTIONS, {"seconds": LOCK_SECONDS}).all()
    connection.rollback()
    return _told(rows)


def _told(rows: Iterable[Any]) -> list[str]:
    return [f"pid {pid} ({name or 'no application_name'}), open for {age}" for pid, name, age in rows]


def _current_revision(connection: Connection) -> str | None:
    return MigrationContext.configure(connection).get_current_revision()


def _refuse_ahead(current: str | None, head: str, place: str) -> None:
    known = {script.revision for script in ScriptDirectory.from_config(alembic_config()).walk_revisions()}
    if current is not None and current not in known:
        raise DatabaseUnavailable(
            f"{place} is at revision {current}, which is newer than this version knows (up to {head}): "
            "install the newer driftguard",
            current_revision=current,
            needed_revision=head,
        )
