"""Whatever the database does, who waits for it is told: through a proxy that passes nothing on, by a frozen
server, by locks that somebody keeps, while nothing may be written."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import UTC, datetime

import psutil
import psycopg
import pytest
from procrastinate import App, exceptions
from sqlalchemy import text

from driftguard.errors import DatabaseUnavailable
from driftguard.store import database as kinds
from driftguard.store import folding, job_queue
from driftguard.store.database import (
    CHECK,
    FOLD,
    UPGRADE,
    Database,
    DatabaseTimeout,
    NoAnswer,
    Work,
    connect_parameters,
)
from driftguard.store.records import insert_batches
from driftguard.store.streams import StreamRegistry
from tests.api.ingest_server import read_only
from tests.store.black_hole import BlackHole, Direction, black_hole
from tests.store.samples import make_records

SHORT = Work("short work", statement_seconds=0.3, lock_seconds=0.2, idle_seconds=60)
SHORTLY_IDLE = Work("idle work", statement_seconds=60, lock_seconds=60, idle_seconds=0.3)
LONGER = Work("longer work", statement_seconds=2, lock_seconds=2, idle_seconds=60)
WAIT_SECONDS = 60


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("driftguard.store.database.ANSWER_MARGIN_SECONDS", 0.2)
    monkeypatch.setattr("driftguard.store.database.PING_SECONDS", 0.3)


@pytest.fixture
def hole(database_url: str) -> Iterator[BlackHole]:
    with black_hole(database_url) as hole:
        yield hole


@pytest.fixture
def far(hole: BlackHole) -> Iterator[Database]:
    """The database, through the proxy."""
    opened = Database.open(f"{hole.url}&connect_timeout=2")
    yield opened
    opened.close()


def too_late(how: str) -> AbstractContextManager[pytest.ExceptionInfo[DatabaseTimeout]]:
    return pytest.raises(DatabaseTimeout, match=how)


def ask(database: Database, of: Work = SHORT) -> object:
    with database.session(of) as session:
        return session.scalar(text("SELECT 1"))


@pytest.mark.parametrize("held", [("to_database",), ("to_client",)])
def test_a_statement_that_is_never_answered_ends_and_the_next_one_works(
    far: Database, hole: BlackHole, held: tuple[Direction, ...]
) -> None:
    told: list[DatabaseTimeout] = []
    far.on_timeout(told.append)
    with too_late(r"short work: there was no answer for 0\.5 s") as caught, far.session(SHORT) as session:
        session.execute(text("SELECT 1"))
        hole.hold(*held)
        session.execute(text("SELECT 2"))
    assert (caught.value.reason, caught.value.status, told) == ("silence", 503, [caught.value])
    hole.resume()
    assert ask(far) == 1


def test_neither_a_pooled_nor_a_new_connection_is_waited_for(far: Database, hole: BlackHole) -> None:
    assert ask(far) == 1
    hole.hold()
    with pytest.raises(DatabaseUnavailable, match="timeout"):  # the pooled one is found dead, a new one fails
        ask(far)
    hole.resume()
    assert ask(far) == 1


def test_a_database_that_moved_is_found_through_new_connections(far: Database, hole: BlackHole) -> None:
    assert ask(far) == 1
    hole.hold(new_connections=False)
    assert ask(far) == 1


def test_a_commit_and_a_copy_that_are_not_answered_end(far: Database, hole: BlackHole) -> None:
    records = [make_records(500)]
    for moment in ("copy", "commit"):
        with too_late("no answer"), far.session(SHORT) as session:
            if moment == "copy":
                session.execute(text("SELECT 1"))
                hole.hold()
            insert_batches(session, records, StreamRegistry(), datetime.now(UTC))
            hole.hold()
        hole.resume()
    with far.session(LONGER) as session:  # sent again; only the commit may have arrived before
        (result,) = insert_batches(session, records, StreamRegistry(), datetime.now(UTC))
    assert result.accepted in (0, 500)
    with far.session() as session:
        assert session.scalar(text("SELECT count(*) FROM records")) == 500


def test_a_backend_that_is_frozen_is_given_up(database: Database) -> None:
    with ExitStack() as thawing:
        with too_late("no answer"), database.session(SHORT) as session:
            thawing.enter_context(stopped(session.scalar(text("SELECT pg_backend_pid()"))))
            session.execute(text("SELECT 1"))
        assert ask(database) == 1  # through another connection: only this one's backend is frozen


@contextmanager
def stopped(pid: int | None) -> Iterator[None]:
    process = psutil.Process(pid)
    process.suspend()
    try:
        yield
    finally:
        process.resume()


def test_a_long_statement_is_cancelled_by_the_server(database: Database) -> None:
    late = too_late(r"short work: a statement was cancelled after 0\.3 s")
    with late as caught, database.session(SHORT) as session:
        session.execute(text("SELECT pg_sleep(30)"))
    assert caught.value.reason == "statement"


def test_a_lock_that_another_keeps_is_not_waited_for_longer_than_said(database: Database) -> None:
    with psycopg.connect(database.libpq_url) as keeper:
        keeper.execute("LOCK TABLE streams")
        late = too_late(r"short work: waited 0\.2 s for a lock")
        with late as caught, database.session(SHORT) as session:
            session.execute(text("LOCK TABLE streams"))
        assert caught.value.reason == "lock"
    with database.session(SHORT) as session:
        session.execute(text("LOCK TABLE streams"))


def test_a_check_tells_that_somebody_keeps_a_lock(database: Database) -> None:
    with database.session(LONGER) as other:
        other.execute(text("LOCK TABLE fold_positions"))
        late = too_late("check: waited 2 s for a lock that another holds")
        with late, database.session(CHECK) as session:
            folding.lag(session)


def test_what_a_frozen_process_locked_is_free_after_a_while(database: Database) -> None:
    frozen, idle = threading.Event(), threading.Event()

    def freeze() -> None:
        late = too_late(r"its transaction did nothing for 0\.3 s")
        with late, database.session(SHORTLY_IDLE) as session:
            session.execute(text("LOCK TABLE streams"))
            frozen.set()
            idle.wait(WAIT_SECONDS)
            session.execute(text("SELECT 1"))

    thread = threading.Thread(target=freeze)
    thread.start()
    assert frozen.wait(WAIT_SECONDS)
    with database.session(LONGER) as session:
        session.execute(text("LOCK TABLE streams"))
    idle.set()
    thread.join()


def test_each_unit_of_work_has_its_own_limits_on_the_same_connection(database: Database) -> None:
    def limits(of: Work) -> tuple[object, ...]:
        with database.session(of) as session:
            names = ("statement_timeout", "lock_timeout", "TimeZone")
            shown = [session.scalar(text(f"SHOW {name}")) for name in names]
            return (session.scalar(text("SELECT pg_backend_pid()")), *shown)

    pid = limits(SHORT)[0]
    assert limits(SHORT) == (pid, "300ms", "200ms", "UTC")
    assert limits(FOLD) == (pid, "45s", "40s", "UTC")
    assert limits(UPGRADE) == (pid, "0", "0", "UTC")
    assert limits(SHORT) == (pid, "300ms", "200ms", "UTC")


@pytest.mark.parametrize("name", ["INGEST", "FOLD", "REQUEST", "CHORE", "MAINTENANCE", "CHECK", "JOBS"])
def test_every_kind_of_work_but_an_upgrade_has_an_end(name: str) -> None:
    limits: Work = getattr(kinds, name)
    assert 0 < limits.lock_seconds < limits.statement_seconds < limits.silence_seconds < 700
    assert 0 < limits.idle_seconds <= 300


def test_what_the_fold_of_a_frozen_process_locked_is_free_after_a_minute(database: Database) -> None:
    with database.session(FOLD) as session:
        assert session.scalar(text("SHOW idle_in_transaction_session_timeout")) == "1min"


def test_a_new_connection_watches_its_socket_unless_the_url_says_otherwise() -> None:
    ours = connect_parameters({})
    assert (ours["keepalives"], ours["tcp_user_timeout"], ours["connect_timeout"]) == (1, 20_000, 5)
    database = Database.open("postgresql://u@127.0.0.1:1/d?tcp_user_timeout=7000&keepalives=0")
    _, parameters = database.engine.dialect.create_connect_args(database.url)
    given = {**parameters, **connect_parameters(database.url.query)}
    assert (given["tcp_user_timeout"], given["keepalives"], given["keepalives_idle"]) == ("7000", "0", 10)
    database.close()


def test_adding_a_job_does_not_wait_for_an_answer_that_never_comes(
    far: Database, hole: BlackHole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queue, "JOBS", SHORT)
    app = App(connector=job_queue.deferring_connector(far))
    with app.open():
        statement = "SELECT 1 AS one"
        assert app.connector.execute_query_one(statement) == {"one": 1}
        with app.connector.pool.connection() as connection:  # type: ignore[attr-defined]
            hole.hold()
            with pytest.raises(NoAnswer):
                connection.execute(statement)
        app.connector.pool.timeout = 1  # type: ignore[attr-defined]
        with pytest.raises(exceptions.ConnectorException):
            app.connector.execute_query_one(statement)
        hole.resume()
        app.connector.pool.timeout = WAIT_SECONDS  # type: ignore[attr-defined]
        assert app.connector.execute_query_one(statement) == {"one": 1}


def test_jobs_are_added_again_once_the_database_may_be_written(database: Database) -> None:
    app = App(connector=job_queue.deferring_connector(database))
    with app.open():
        write = "DELETE FROM procrastinate_jobs"
        with read_only(database), pytest.raises(exceptions.ConnectorException):
            app.connector.execute_query(write)
        for _ in range(job_queue._POOL_CONNECTIONS):
            with suppress(exceptions.ConnectorException):
                app.connector.execute_query(write)  # each that the pool had opened meanwhile is closed
        app.connector.execute_query(write)


def test_a_worker_does_not_wait_for_an_answer_that_never_comes(
    far: Database, hole: BlackHole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queue, "JOBS", SHORT)
    asyncio.run(_work_through(far, hole))


async def _work_through(far: Database, hole: BlackHole) -> None:
    app = App(connector=job_queue.worker_connector(far))
    async with app.open_async():
        hole.hold()
        app.connector.pool.timeout = 1  # type: ignore[attr-defined]
        with pytest.raises(exceptions.ConnectorException):
            await app.connector.execute_query_one_async("SELECT 1 AS one")
        hole.resume()
        app.connector.pool.timeout = WAIT_SECONDS  # type: ignore[attr-defined]
        assert await app.connector.execute_query_one_async("SELECT 1 AS one") == {"one": 1}
