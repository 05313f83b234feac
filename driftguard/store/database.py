"""The database connection: one engine, one unit of work per `session()`, and the check of its schema."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import psycopg
from sqlalchemy import URL, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session, sessionmaker

from driftguard.errors import BadSettings, DatabaseUnavailable
from driftguard.store import migrations

CONNECT_TIMEOUT_SECONDS = 5
POOL_SIZE = 5
POOL_OVERFLOW = 10
POOL_TIMEOUT_SECONDS = 10
POOL_RECYCLE_SECONDS = 1_800
# psycopg's own errors come from COPY, which bypasses SQLAlchemy.
_UNREACHABLE = (
    OperationalError,
    InterfaceError,
    PoolTimeout,
    psycopg.OperationalError,
    psycopg.InterfaceError,
)
_SCHEMES = ("postgres", "postgresql", "postgresql+psycopg")


@dataclass(frozen=True, slots=True)
class Database:
    """An open database. Repositories take the Session that `session()` gives and never commit."""

    engine: Engine
    url: URL
    _sessions: sessionmaker[Session]

    @classmethod
    def open(cls, url: str) -> Database:
        """Prepares the connection pool; connects at first use. Raises BadSettings for a URL it cannot use."""
        parsed = parse_url(url)
        engine = create_engine(
            parsed,
            connect_args={"connect_timeout": CONNECT_TIMEOUT_SECONDS},
            pool_size=POOL_SIZE,
            max_overflow=POOL_OVERFLOW,
            pool_timeout=POOL_TIMEOUT_SECONDS,
            pool_recycle=POOL_RECYCLE_SECONDS,
            pool_pre_ping=True,
            pool_use_lifo=True,
        )
        event.listen(engine, "connect", _prepare_connection, insert=True)  # before SQLAlchemy asks anything
        return cls(engine=engine, url=parsed, _sessions=sessionmaker(engine, expire_on_commit=False))

    @contextmanager
    def session(self) -> Iterator[Session]:
        """One unit of work: commits at the end, rolls back on any error.

        Raises DatabaseUnavailable when the database cannot be reached or drops the connection.
        """
        with self.reachable(), self._sessions.begin() as session:
            yield session

    def check_schema(self) -> None:
        """Raises DatabaseUnavailable: unreachable, behind this version's migrations, or ahead of them."""
        with self.reachable(), self.engine.connect() as connection:
            migrations.check_revision(connection, place=self.place)

    def upgrade(self) -> None:
        """Runs the migrations that are missing. Raises DatabaseUnavailable (unreachable, or ahead)."""
        with self.reachable(), self.engine.connect() as connection:
            migrations.run_upgrade(connection, place=self.place)

    def close(self) -> None:
        self.engine.dispose()

    @property
    def libpq_url(self) -> str:
        """The URL for libpq and psycopg themselves, with the password."""
        return self.url.set(drivername="postgresql").render_as_string(hide_password=False)

    @property
    def place(self) -> str:
        """Where the database is, for messages; never the password."""
        host = self.url.host or self.url.query.get("host") or "the local socket"
        return f"database {self.url.database or 'postgres'!r} at {host}:{self.url.port or 5432}"

    @contextmanager
    def reachable(self) -> Iterator[None]:
        """Raises DatabaseUnavailable for what the driver raises of a connection that fails."""
        try:
            yield
        except _UNREACHABLE as error:
            raise DatabaseUnavailable(f"{self.place}: {_reason(error)}") from error


def upgrade(url: str) -> None:
    """Brings the database at `url` to this version's schema; safe to call from several processes at once.

    Raises BadSettings (the URL), DatabaseUnavailable (unreachable, or newer than this version).
    """
    database = Database.open(url)
    try:
        database.upgrade()
    finally:
        database.close()


def parse_url(url: str) -> URL:
    """Accepts postgres://, postgresql://, postgresql+psycopg://. Raises BadSettings; never shows the URL."""
    try:
        parsed = make_url(url)
    except (ArgumentError, ValueError):
        raise BadSettings(
            "database_url: not a URL; expected postgresql://user:password@host:port/database"
        ) from None
    if parsed.drivername not in _SCHEMES:
        raise BadSettings(f"database_url: {parsed.drivername}:// is not supported; expected postgresql://")
    parsed = parsed.set(drivername="postgresql+psycopg")
    if "application_name" not in parsed.query:
        parsed = parsed.update_query_dict({"application_name": "driftguard"})
    return parsed


def _prepare_connection(connection: psycopg.Connection[Any], _record: object) -> None:
    """Raises BadSettings: text that is not UTF-8 is lost, or comes back as bytes."""
    encoding = connection.info.parameter_status("server_encoding")
    if encoding not in ("UTF8", None):  # a pooler may keep it to itself
        raise BadSettings(
            f"database_url: the database {connection.info.dbname!r} is encoded in {encoding}; "
            "make it with ENCODING 'UTF8' TEMPLATE template0"
        )
    # A statement instead of the `options` start-up parameter, which connection poolers refuse.
    connection.autocommit = True
    connection.execute("SET TIME ZONE 'UTC'")
    connection.autocommit = False


def _reason(error: Exception) -> str:
    cause = error.orig if isinstance(error, (OperationalError, InterfaceError)) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[0] if lines else type(cause).__name__
