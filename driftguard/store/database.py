"""How a unit of work gets a connection: limits for each kind of work, connections that notice when nobody is
there any more, one engine with one unit of work per `session()`, and the check of its schema.

docs/production.md has the limits as a table. Packets that are dropped end in an error of the socket:
keepalives, and tcp_user_timeout for what was sent and not acknowledged. A server that is frozen, or a
middlebox that acknowledges for it, does not: there a connection gives up by itself when an answer is overdue.
"""

from __future__ import annotations

import math
import random
import re
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import psycopg
import structlog
from psycopg.conninfo import conninfo_to_dict, make_conninfo
from psycopg.errors import (
    IdleInTransactionSessionTimeout,
    InsufficientPrivilege,
    InvalidSchemaName,
    LockNotAvailable,
    ProgramLimitExceeded,
    QueryCanceled,
    ReadOnlySqlTransaction,
)
from psycopg.pq import TransactionStatus
from sqlalchemy import (
    URL,
    Connection,
    Engine,
    create_engine,
    event,
    make_url,
    text,
)
from sqlalchemy.exc import ArgumentError, DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.orm import Session

from driftguard.errors import BadInput, BadSettings, DatabaseUnavailable
from driftguard.store import migrations, pooled_sessions
from driftguard.store.column_types import tell_refusals_as_they_are

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
# The role may not do it, or there is nothing that it could do it in.
_REFUSED = (InsufficientPrivilege, InvalidSchemaName)
_SCHEMES = ("postgres", "postgresql", "postgresql+psycopg")
# Several hosts as libpq takes them in place of one, one:5432,two:5432, which make_url does not read.
_HOST: Final = r"(?:\[[^\]/?@]*\]|[^\[\]:,/?@]*)(?::\d*)?"
_SEVERAL_HOSTS: Final = re.compile(rf"([^/]+://(?:[^/?@]*@)?)({_HOST}(?:,{_HOST})+)((?:[/?].*)?)")
# A database that may only be read, as a hot standby, refuses it.
DELETES_NOTHING: Final = text("DELETE FROM alembic_version WHERE false")
_WORK = "work"  # in `Connection.info`: what the server was last told about
ANSWER_MARGIN_SECONDS: Final = 5.0  # after which an answer that the server owes by its own clock is overdue
CONNECT_TIMEOUT_SECONDS: Final = 5
PING_SECONDS: Final = 3.0  # for the word whether a connection out of the pool still works
# libpq ignores all but the first over a Unix socket.
_OF_A_NEW_CONNECTION: Final = {
    "connect_timeout": CONNECT_TIMEOUT_SECONDS,
    "keepalives": 1,
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 4,
    "tcp_user_timeout": 20_000,  # milliseconds
}
# The server, too, notices within half a minute that the machine at the other end is gone, not after hours:
# what it locked is free then.
_SERVER_KEEPALIVES: Final = {
    "tcp_keepalives_idle": "10",
    "tcp_keepalives_interval": "5",
    "tcp_keepalives_count": "4",
}
# In every session, because a role, a database or a variable such as PGDATESTYLE may have others: then the
# driver cannot read times, names in other scripts cannot be sent, floats are rounded, and who waited for
# a lock does not see what its holder wrote. And each statement is planned for what it asks: a plan for any
# values, of which PostgreSQL thinks well where a table has many partitions, goes through the records of all
# streams for those of one; and compiling a plan takes longer than most of ours run.
_SESSION: Final = {
    "TimeZone": "UTC",
    "DateStyle": "ISO",
    "IntervalStyle": "postgres",
    "client_encoding": "UTF8",
    "extra_float_digits": "1",
    "default_transaction_isolation": "read committed",
    "plan_cache_mode": "force_custom_plan",
    "jit": "off",
    **_SERVER_KEEPALIVES,
}
# How psycopg lists why each of several addresses failed; its first line tells the last one alone.
_ATTEMPT: Final = re.compile(r"^- host: .*?, hostaddr: .*?: (?:connection failed: )?(.+)$", re.MULTILINE)
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Work:
    """Limits of one kind of work; 0 stands for none.

    The server keeps the first three by itself. It cannot tell us so through a network that passes nothing, so
    whoever waits for an answer gives up on the connection some seconds later.
    """

    name: str
    statement_seconds: float  # one statement, waits for locks included
    lock_seconds: float  # one wait for a lock, of a row, a table or an advisory one; less, so that it is told
    idle_seconds: float  # an open transaction without a statement: what it locked is free afterwards

    @property
    def silence_seconds(self) -> float:
        """How long an answer may take before its connection is given up."""
        return self.statement_seconds + ANSWER_MARGIN_SECONDS if self.statement_seconds else math.inf

    def server_settings(self) -> dict[str, str]:
        return {
            "statement_timeout": f"{self.statement_seconds * 1000:.0f}",
            "lock_timeout": f"{self.lock_seconds * 1000:.0f}",
            "idle_in_transaction_session_timeout": f"{self.idle_seconds * 1000:.0f}",
        }


# Senders wait for it, and send again what was not acknowledged.
INGEST: Final = Work("ingest", statement_seconds=10, lock_seconds=8, idle_seconds=30)
# Waits for the batch of another sidecar, and computes between its statements: for seconds, as a batch that
# ran out of this time is followed by smaller ones.
FOLD: Final = Work("fold", statement_seconds=45, lock_seconds=40, idle_seconds=60)
# Pages, API calls, jobs: whatever asks for nothing else.
REQUEST: Final = Work("request", statement_seconds=30, lock_seconds=5, idle_seconds=300)
# What recurs in the background: looking around, diagnoses, costs.
CHORE: Final = Work("chore", statement_seconds=45, lock_seconds=10, idle_seconds=300)
# A page waits for it; driftguard.incidents.examination has for how long.
EXAMINATION: Final = Work("examination", statement_seconds=15, lock_seconds=5, idle_seconds=60)
# Partitions and retention: long, but nothing that ingest may have to queue behind.
MAINTENANCE: Final = Work("maintenance", statement_seconds=600, lock_seconds=5, idle_seconds=60)
# Whether the database is there at all, and locks that only have to be looked at.
CHECK: Final = Work("check", statement_seconds=3, lock_seconds=2, idle_seconds=30)
# Somebody waits for it at a terminal; it may rewrite tables.
UPGRADE: Final = Work("upgrade", statement_seconds=0, lock_seconds=0, idle_seconds=0)
# The job queue: short statements, on connections of its own.
JOBS: Final = Work("jobs", statement_seconds=20, lock_seconds=10, idle_seconds=300)


class NoAnswer(psycopg.OperationalError):
    """The database did not answer for {seconds} s."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"no answer for {seconds:g} s")
        self.seconds = seconds


class WatchedConnection(psycopg.Connection[Any]):
    """Raises NoAnswer, and closes itself, where a statement is not answered within `silence_seconds`."""

    silence_seconds: float = PING_SECONDS + CONNECT_TIMEOUT_SECONDS
    was_read_only = False

    def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().wait(_watched(gen, self.pgconn, self.silence_seconds), *args, **kwargs)
        except NoAnswer:
            self.close()
            raise
        except ReadOnlySqlTransaction:
            self.was_read_only = True
            raise


class WatchedAsyncConnection(psycopg.AsyncConnection[Any]):
    """The same for asyncio."""

    silence_seconds: float = PING_SECONDS + CONNECT_TIMEOUT_SECONDS

    async def wait(self, gen: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return await super().wait(_watched(gen, self.pgconn, self.silence_seconds), *args, **kwargs)
        except NoAnswer:
            await self.close()
            raise


def _watched(gen: Any, pgconn: psycopg.pq.abc.PGconn, seconds: float) -> Generator[Any, Any, Any]:
    """What psycopg waits for, which it resumes a few times a second also where nothing came.

    Who listens for notifications has no statement under way, and may wait for as long as it takes.
    """
    deadline = time.monotonic() + seconds
    ready = None
    while True:
        try:
            state = gen.send(ready)
        except StopIteration as end:
            return end.value
        ready = yield state
        if (
            not ready
            and time.monotonic() > deadline
            and pgconn.transaction_status == TransactionStatus.ACTIVE
        ):
            raise NoAnswer(seconds)


def connect_parameters(given: Mapping[str, object]) -> dict[str, Any]:
    """What a connection is opened with, unless the database's URL says otherwise (`given`)."""
    return {name: value for name, value in _OF_A_NEW_CONNECTION.items() if name not in given}


def session_settings(work: Work | None = None) -> tuple[str, dict[str, str]]:
    """One statement for all of them, and its parameters. A statement instead of the `options` start-up
    parameter, which connection poolers refuse."""
    settings = _SESSION if work is None else work.server_settings()
    calls = ", ".join(f"set_config('{name}', %({name})s, false)" for name in settings)
    return f"SELECT {calls}", settings


def apply_settings(connection: psycopg.Connection[Any], work: Work | None = None) -> None:
    """Outside a transaction, whose end would undo it."""
    statement, settings = session_settings(work)
    before, connection.autocommit = connection.autocommit, True
    connection.execute(statement.encode(), settings)
    connection.autocommit = before


async def apply_settings_async(connection: psycopg.AsyncConnection[Any], work: Work) -> None:
    before = connection.autocommit
    await connection.set_autocommit(True)
    for of in (None, work):
        statement, settings = session_settings(of)
        await connection.execute(statement.encode(), settings)
    await connection.set_autocommit(before)


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
            connect_args=connect_parameters(parsed.query),
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
                apply_settings(driver, work)
                connection.info[_WORK] = work.name
        except psycopg.Error as error:
            connection.invalidate(error)
            raise
        driver.silence_seconds = work.silence_seconds

    def on_timeout(self, tell: Callable[[DatabaseTimeout], None]) -> None:
        """Calls `tell` for each DatabaseTimeout from now on, on the thread that it happens to."""
        self._on_timeout.append(tell)

    def check_schema(self) -> None:
        """Raises DatabaseUnavailable: unreachable, behind this version's migrations, ahead of them, or
        read-only."""
        with self.connect(CHECK) as connection:
            migrations.check_revision(connection, place=self.place)
            connection.execute(DELETES_NOTHING)

    def check_sessions(self) -> None:
        """Raises BadSettings where a pooler pools transactions: a lock would be another's, and stay behind.
        Raises DatabaseUnavailable."""
        with self.connect(CHECK) as one, self.connect(CHECK) as other:
            if pooled_sessions.is_shared(one, other):
                raise BadSettings(
                    f"database_url: {self.place}: a connection pooler in between pools transactions, which "
                    "loses the locks and settings of a session: let it pool sessions (PgBouncer: "
                    "pool_mode = session), or name PostgreSQL's own address"
                )

    def upgrade(self) -> None:
        """Runs the migrations that are missing. Raises DatabaseUnavailable (unreachable, or ahead), and
        BadSettings as `check_sessions`."""
        self.check_sessions()
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
        hosts = str(host).split(",")
        ports = str(self.url.port or self.url.query.get("port") or 5432).split(",")
        ports = ports if len(ports) > 1 else ports * len(hosts)
        at = ", ".join(f"{name}:{port or 5432}" for name, port in zip(hosts, ports, strict=False))
        return f"database {self.url.database or 'postgres'!r} at {at}"

    @contextmanager
    def reachable(self, work: Work = REQUEST) -> Iterator[None]:
        """Raises DatabaseUnavailable for what the driver raises of a connection that fails, may only read or
        lacks a right, and BadInput for a value that no index can hold."""
        try:
            yield
        except (*_UNREACHABLE, DBAPIError, psycopg.Error) as error:
            if isinstance(_cause(error), ProgramLimitExceeded):  # for the driver it is an operational error
                raise BadInput(f"a value is too large for the database: {_reason(error)}") from error
            if (timeout := self._timeout(error, work)) is not None:
                self._report(timeout)
                raise timeout from error
            if isinstance(_cause(error), _REFUSED):
                raise DatabaseUnavailable(
                    f"{self.place}: {_reason(error)}; {self._what_is_owned()}"
                ) from error
            if _is_read_only(error):
                raise DatabaseUnavailable(
                    f"{self.place}: {_reason(error)}: it is a standby, or set to be read-only"
                ) from error
            if not isinstance(error, _UNREACHABLE):
                raise
            raise DatabaseUnavailable(f"{self.place}: {_reason(error)}") from error

    def _what_is_owned(self) -> str:
        role = self.url.username or self.url.query.get("user") or "of DriftGuard"
        return (
            f"the role {role} has to own the database, or a schema in its search_path, and the tables in it"
        )

    def _timeout(self, error: Exception, work: Work) -> DatabaseTimeout | None:
        match _cause(error):
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
    rest, hosts = _without_several_hosts(url.strip())  # a file ends in a newline
    try:
        parsed = make_url(rest)
    except (ArgumentError, ValueError):
        raise BadSettings(
            "database_url: not a URL; expected postgresql://user:password@host:port/database"
        ) from None
    if parsed.drivername not in _SCHEMES:
        raise BadSettings(f"database_url: {parsed.drivername}:// is not supported; expected postgresql://")
    if url.count("@") > 1 and "@" in f"{parsed.host}{parsed.database}":
        raise BadSettings(
            "database_url: special characters of a password are to be escaped, such as @ as %40"
        )
    try:
        make_conninfo(**dict.fromkeys(parsed.query, ""))
    except psycopg.ProgrammingError as error:
        raise BadSettings(f"database_url: {_reason(error)}") from None
    parsed = parsed.set(drivername="postgresql+psycopg", query={**hosts, **parsed.query})
    if "host" in parsed.query:  # host=a:1&host=b:2 is SQLAlchemy's way, and libpq's host=a,b&port=1,2
        host, port = parsed.query["host"], parsed.query.get("port")
        if isinstance(host, str) and isinstance(port, str) and "," not in port:  # which libpq uses for all
            parsed = parsed.update_query_dict({"port": ",".join([port] * len(host.split(",")))})
        try:
            _, arguments = parsed.get_dialect()().create_connect_args(parsed)
        except ArgumentError as error:
            raise BadSettings(f"database_url: {_reason(error)}") from None
        except ValueError:  # more colons than that before a port
            raise BadSettings(
                "database_url: several hosts that are IPv6 addresses are written as host=one,two&port=1,2"
            ) from None
        named = {name: str(arguments[name]) for name in ("host", "port") if arguments.get(name)}
        parsed = parsed.update_query_dict(named)
    if "application_name" not in parsed.query:
        parsed = parsed.update_query_dict({"application_name": "driftguard"})
    return parsed


def _without_several_hosts(url: str) -> tuple[str, dict[str, str]]:
    """(the URL without its hosts, these as the options host and port) where it names several as libpq does;
    else it is left as it is. Raises BadSettings."""
    found = _SEVERAL_HOSTS.fullmatch(url)
    if found is None:
        return url, {}
    start, hosts, end = found.groups()
    try:
        named = conninfo_to_dict(f"postgresql://{hosts}/")
    except psycopg.ProgrammingError as error:
        raise BadSettings(f"database_url: {_reason(error)}") from None
    return f"{start}{end}", {name: str(named[name]) for name in ("host", "port") if name in named}


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
    apply_settings(connection)


def _expect_a_ping(connection: WatchedConnection | None, _record: object) -> None:
    """Before the next one takes it out of the pool it is asked whether it still works."""
    if connection is not None:  # it was given up
        connection.silence_seconds = PING_SECONDS
        close_if_read_only(connection)


def close_if_read_only(connection: WatchedConnection) -> None:
    """A session that began while the database was read-only may stay so for as long as it is open."""
    if connection.was_read_only:
        connection.close()


def is_outage(error: Exception) -> bool:
    """The database cannot be reached, may not be written, or does not answer. A limit of time that it kept
    itself is none: what was asked for took too long, or somebody holds a lock."""
    if isinstance(error, DatabaseTimeout):
        return error.reason == "silence"
    return isinstance(error, DatabaseUnavailable)


Item = TypeVar("Item")


def each_apart(
    items: Iterable[Item], work: Callable[[Item], None], on_failure: Callable[[Item], None]
) -> None:
    """Does the work on each, whichever fails: raises what the first that failed raised, after all the others.
    At once only what is not of one item: an outage, or a second limit of time, as the database may be slow
    for all. `on_failure`: called while the error is handled."""
    failure: Exception | None = None
    in_turn = list(items)
    random.shuffle(in_turn)  # two that take too long every time would else keep the same others from theirs
    for item in in_turn:
        try:
            work(item)
        except Exception as error:
            if is_outage(error) or (
                isinstance(error, DatabaseTimeout) and isinstance(failure, DatabaseTimeout)
            ):
                raise
            on_failure(item)
            failure = failure or error
    if failure is not None:
        raise failure


def is_too_slow(error: Exception) -> bool:
    """A statement that the server cancelled, or a lock that it did not get in time: the connection works."""
    return isinstance(_cause(error), (QueryCanceled, LockNotAvailable))


def is_database_failure(error: Exception) -> bool:
    """Connection, timeout, deadlock, disk, read-only, rights: whatever was being stored is not the reason. A
    limit that a statement broke by what it holds (class 54: a row too large for its index) is not meant."""
    cause = _cause(error)
    if isinstance(cause, (IdleInTransactionSessionTimeout, *_REFUSED)) or _is_read_only(error):
        return True
    if not isinstance(error, (DatabaseUnavailable, *_UNREACHABLE)):
        return False
    state = getattr(cause, "sqlstate", None)
    return state is None or not state.startswith("54")


def _is_read_only(error: Exception) -> bool:
    return isinstance(_cause(error), ReadOnlySqlTransaction)  # for the driver it is an internal error


def _cause(error: Exception) -> BaseException | None:
    """What the driver has raised."""
    return error.orig if isinstance(error, DBAPIError) else error


def _reason(error: Exception) -> str:
    cause = _cause(error)
    if attempts := _ATTEMPT.findall(str(cause)):
        return "; ".join(dict.fromkeys(attempts))
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return lines[0] if lines else type(cause).__name__
