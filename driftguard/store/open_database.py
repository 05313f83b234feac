"""Opening the database that the settings name, for commands that need nothing else of the sidecar."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress

from driftguard.errors import DatabaseUnavailable
from driftguard.settings import Settings
from driftguard.store import embedded
from driftguard.store.database import Database


@contextmanager
def open_database(settings: Settings, *, makes: bool = True) -> Iterator[Database]:
    """The configured database, or the embedded one, with its schema checked. Without `makes` an embedded
    one that does not exist is not made.

    The embedded database is ours, so it is brought to this version's schema by itself; a server that
    somebody else runs is left alone. Raises BadSettings, DatabaseUnavailable.
    """
    if not makes:
        _refuse_none(settings)
    on_restart: list[Callable[[], None]] = []
    with embedded.database_url(settings, lambda: _call(on_restart)) as url:
        database = Database.open(url, on_restart)
        try:
            if settings.database_url is None:
                database.upgrade()
            else:
                database.check_sessions()
            database.check_schema()
            yield database
        finally:
            database.close()


def _refuse_none(settings: Settings) -> None:
    """In an empty database that it made nobody would find what the sidecar has."""
    if settings.database_url is not None:
        return
    with suppress(OSError):  # may not be seen, which the start of the server tells
        if not embedded.is_made(settings.data_directory):
            raise DatabaseUnavailable(
                "no database: database_url is not set, and none has been made in "
                f"{settings.data_directory / 'postgres'}; give this command the sidecar's settings, "
                "by --config or DRIFTGUARD_CONFIG"
            )


def _call(listeners: Iterable[Callable[[], None]]) -> None:
    for tell in listeners:
        tell()


def upgrade_database(settings: Settings) -> str:
    """Runs the missing migrations; says where. Raises BadSettings, DatabaseUnavailable."""
    with embedded.database_url(settings) as url:
        database = Database.open(url)
        try:
            database.upgrade()
            return database.place
        finally:
            database.close()
