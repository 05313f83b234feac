"""The database connection: one engine, one unit of work per `session()`, and the check of its schema.

A unit of work says what kind it is: driftguard.store.work has how long each waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import psycopg
import structlog
from psycopg.errors import IdleInTransactionSessionTimeout, LockNotAvailable, QueryCanceled
from sqlalchemy import URL, Connection, Engine, create_engine, event, make_url
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from driftguard.errors import BadSettings, DatabaseUnavailable
from driftguard.store import connections, migrations
from driftguard.store.connections import NoAnswer, WatchedConnection
from driftguard.store.finite import tell_refusals_as_they_are
from driftguard.store.work import CHECK, REQUEST, UPGRADE, Work

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
_WORK = "work"  # in `Connection.info`: what the server was last told about
_log = structlog.get_logger(__name__)


class DatabaseTimeout(DatabaseUnavailable):
    """The database took longer than this kind of work waits. What was asked for is rolled back, unless it was
    the commit itself that was not answered."""

    def __init__(self, detail: str, work: Work, reason: str) -> None:
        super().__init__(detail)
        self.work = work
        self.reason = reason  # statement | lock | idle | silence


@dataclass(frozen=True, slots=True)
class Database:
    """An open database. Repositories take the Session that `session()` gives and never commit."""

    engine: Engine
    url: URL
    on_restart: list[Callable[[], None]]  # of an embedded server
    _on_timeout: list[Callable[[DatabaseTimeout], None]] = field(default_factory=list)

    @classmethod
    def open(cls, url: str, on_restart: list[Callable[[], None]] | None = None) -> Database:
        """Prepares the connection pool; connects at first use. Raises BadSettings for a URL it cannot use.

        `on_restart`: what whoever supervises the server calls when it was started again.
        """
        parsed = parse_url(url)
        engine = create_engine(
            parsed,
            connect_args=connections.connect_parameters(parsed.query),
            pool_size=POOL_SIZE,
            max_overflow=POOL_OVERFLOW,
            pool_timeout=POOL_TIMEOUT_SECONDS,
            pool_recycle=POOL_RECYCLE_SECONDS,
            pool_pre_ping=True,
            pool_use_lifo=True,
        )
        event.listen(engine, "do_connect", _connect)
        event.listen(engine, "connect", _prepare_connection, insert=True)  # before SQLAlchemy asks anything
        event.listen(engine, "checkin", _expect_a_ping)
        tell_refusals_as_they_are(engine)
        return cls(engine=engine, url=parsed, on_restart=[] if on_restart is None else on_restart)

    @contextmanager
    def session(self, work: Work = REQUEST) -> Iterator[Session]:
        """One unit of work: commits at the end, rolls back on any error.

        Raises DatabaseUnavailable when the database cannot be reached or drops the connection, and of that
        DatabaseTimeout when it takes longer than `work` waits.
        """
        with (
            self.connect(work) as connection,
            Session(connection, expire_on_commit=False) as session,
            session.begin(),
        ):
            yield session

    @contextmanager
    def connect(self, work: Work = REQUEST) -> Iterator[Connection]:
        """A connection out of the pool, with the limits of `work`. Raises DatabaseUnavailable."""
        with self.reachable(work), self.engine.connect() as connection:
            self.limit(connection, work)
            yield connection

    def limit(self, connection: Connection, work: Work) -> None:
        """Gives a connection that is in no transaction the limits of `work`."""
        driver = connection.connection.driver_connection
        assert isinstance(driver, WatchedConnection)  # noqa: S101 (_connect opens nothing else)
        try:
            if connection.info.get(_WORK) != work.name:
                connections.apply(driver, work)
                connection.info[_WORK] = work.name
        except psycopg.Error as error:
            connection.invalidate(error)
            raise
        driver.silence_seconds = work.silence_seconds

    def on_timeout(self, tell: Callable[[DatabaseTimeout], None]) -> None:
        """Calls `tell` for each DatabaseTimeout from now on, on the thread that it happens to."""
        self._on_timeout.append(tell)

    def check_schema(self) -> None:
        """Raises DatabaseUnavailable: unreachable, behind this version's migrations, or ahead of them."""
        with self.connect(CHECK) as connection:
            migrations.check_revision(connection, place=self.place)

    def upgrade(self) -> None:
        """Runs the migrations that are missing. Raises DatabaseUnavailable (unreachable, or ahead)."""
        with self.connect(UPGRADE) as connection:
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
    def reachable(self, work: Work = REQUEST) -> Iterator[None]:
        """Raises DatabaseUnavailable for what the driver raises of a connection that fails."""
        try:
            yield
        except (*_UNREACHABLE, DBAPIError, psycopg.Error) as error:
            if (timeout := self._timeout(error, work)) is not None:
                self._report(timeout)
                raise timeout from error
            if not isinstance(error, _UNREACHABLE):
                raise
            raise DatabaseUnavailable(f"{self.place}: {_reason(error)}") from error

    def _timeout(self, error: Exception, work: Work) -> DatabaseTimeout | None:
        match error.orig if isinstance(error, DBAPIError) else error:
            case NoAnswer() as silent:
                reason, waited = "silence", f"there was no answer for {silent.seconds:g} s"
            case LockNotAvailable():
                reason, waited = "lock", f"waited {work.lock_seconds:g} s for a lock that another holds"
            case QueryCanceled():
                reason, waited = (
                    "statement",
                    f"a statement was cancelled after {work.statement_seconds:g} s",
                )
            case IdleInTransactionSessionTimeout():
                reason, waited = "idle", f"its transaction did nothing for {work.idle_seconds:g} s"
            case _:
                return None
        return DatabaseTimeout(f"{self.place}: {work.name}: {waited}", work, reason)

    def _report(self, timeout: DatabaseTimeout) -> None:
        _log.warning("database_timeout", work=timeout.work.name, reason=timeout.reason, detail=timeout.detail)
        for tell in self._on_timeout:
            tell(timeout)


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


def _connect(
    _dialect: object, _record: object, args: list[Any], parameters: dict[str, Any]
) -> WatchedConnection:
    return WatchedConnection.connect(*args, **parameters)


def _prepare_connection(connection: psycopg.Connection[Any], _record: object) -> None:
    """Raises BadSettings: text that is not UTF-8 is lost, or comes back as bytes."""
    encoding = connection.info.parameter_status("server_encoding")
    if encoding not in ("UTF8", None):  # a pooler may keep it to itself
        raise BadSettings(
            f"database_url: the database {connection.info.dbname!r} is encoded in {encoding}; "
            "make it with ENCODING 'UTF8' TEMPLATE template0"
        )
    connections.apply(connection)


def _expect_a_ping(connection: WatchedConnection | None, _record: object) -> None:
    """Before the next one takes it out of the pool it is asked whether it still works."""
    if connection is not None:  # it was given up
        connection.silence_seconds = connections.PING_SECONDS


def is_too_slow(error: Exception) -> bool:
    """A statement that the server cancelled, or a lock that it did not get in time: the connection works."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    return isinstance(cause, (QueryCanceled, LockNotAvailable))


def is_database_failure(error: Exception) -> bool:
    """Connection, timeout, deadlock, disk: whatever was being stored is not the reason. A limit that a
    statement broke by what it holds (class 54, as a row too large for its index) is not meant."""
    cause = error.orig if isinstance(error, DBAPIError) else error
    if isinstance(cause, IdleInTransactionSessionTimeout):
        return True
    if not isinstance(error, (DatabaseUnavailable, *_UNREACHABLE)):
        return False
    state = getattr(cause, "sqlstate", None)
    return state is None or not state.startswith("54")


def _reason(error: Exception) -> str:
    cause = error.orig if isinstance(error, (OperationalError, InterfaceError)) else error
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[0] if lines else type(cause).__name__
