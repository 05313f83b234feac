"""Running alembic from the program: no alembic.ini, the same in a source checkout and in a wheel."""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from driftguard.errors import DatabaseUnavailable

_UPGRADE_LOCK = 0x6472696674_01  # "drift" + 1: one upgrade at a time


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
    """Upgrades to the head revision. Raises DatabaseUnavailable when the database is ahead."""
    connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": _UPGRADE_LOCK})
    connection.commit()
    try:
        _refuse_ahead(_current_revision(connection), head_revision(), place)
        command.upgrade(alembic_config(connection), "head")
        connection.commit()
    finally:
        connection.rollback()
        connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": _UPGRADE_LOCK})
        connection.commit()


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
