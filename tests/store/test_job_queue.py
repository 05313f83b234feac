"""The workers of jobs: their connections, and what the log says while the database is away."""

from __future__ import annotations

import asyncio
import logging
import threading
from contextlib import suppress

import psycopg
import pytest
from procrastinate import App
from procrastinate.exceptions import ConnectorException
from procrastinate.utils import cancel_and_capture_errors
from sqlalchemy import text

from driftguard.store import job_queue
from driftguard.store.database import Database
from driftguard.store.job_queue import WorkerJobs, deferring_connector, worker_connector


async def _unreachable() -> None:
    try:
        await psycopg.AsyncConnection.connect("postgresql://127.0.0.1:1/nothing")
    except psycopg.OperationalError as error:
        raise ConnectorException from error


async def _broken() -> None:
    raise ZeroDivisionError


def test_a_database_that_is_away_leaves_no_traceback_of_each_task_and_other_errors_do(
    database: Database, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        worker_connector(database)
        tasks = [asyncio.create_task(task(), name=task.__name__) for task in (_unreachable, _broken)]
        await asyncio.wait(tasks)
        await cancel_and_capture_errors(tasks)

    asyncio.run(scenario())
    errors = [record.exc_info[1] for record in caplog.records if record.exc_info]
    assert [type(error) for error in errors] == [ZeroDivisionError]


def test_of_a_database_that_is_away_only_the_caller_tells(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_queue, "_POOL_SECONDS", 1.0)
    away = Database.open("postgresql://u@127.0.0.1:1,127.0.0.1:2/d")
    with App(connector=deferring_connector(away)).open() as app, pytest.raises(ConnectorException):
        app.connector.execute_query("SELECT 1")
    away.close()
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_worker_that_is_told_to_end_as_it_gets_a_connection_ends(database: Database) -> None:
    assert asyncio.run(_lost_cancellations(database)) == 0


async def _lost_cancellations(database: Database) -> int:
    """How often a task that waits for a connection goes on, of those that are cancelled a few steps of the
    event loop after it is there."""
    lost = 0
    async with App(connector=worker_connector(database)).open_async() as app:
        pool = app.connector.pool  # type: ignore[attr-defined]
        for steps in range(12):
            held = [await pool.getconn() for _ in range(pool.max_size)]
            waiting = asyncio.create_task(pool.getconn())
            await asyncio.sleep(0.02)
            await pool.putconn(held.pop())
            for _ in range(steps):
                await asyncio.sleep(0)
            is_in_time = waiting.cancel()
            with suppress(asyncio.CancelledError):
                held.append(await waiting)
                lost += is_in_time
            for connection in held:
                await pool.putconn(connection)
    return lost


@pytest.mark.parametrize("is_told", [False, True], ids=["not told", "told and not answered"])
def test_a_job_that_ends_while_the_database_is_away_ends_once_it_is_back(
    database: Database, monkeypatch: pytest.MonkeyPatch, is_told: bool
) -> None:
    """Its worker lives on. A job that counts as running is not queued again."""
    monkeypatch.setattr(job_queue, "_PAUSE_SECONDS", 0.01)
    monkeypatch.setattr(job_queue, "_POOL_SECONDS", 0.2)
    assert asyncio.run(_left_behind(database, is_told)) == []


async def _left_behind(database: Database, is_told: bool) -> list[str]:
    """What a worker leaves of a job at whose end the database is away for a second, but for the connection
    that listens: rows, and errors that nobody has seen."""
    left: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: left.append(context["message"]))
    connector = worker_connector(database)
    app = App(connector=connector)
    app.job_manager = WorkerJobs(connector, lambda: False)
    name = database.url.database
    with psycopg.connect(database.libpq_url, dbname="postgres", autocommit=True) as admin:
        allow = f"ALTER DATABASE {name} ALLOW_CONNECTIONS"
        back = threading.Timer(1.0, admin.execute, [f"{allow} true"])

        @app.task(name="job")
        def job() -> None:
            if is_told:
                with database.session() as session:
                    session.execute(text("DELETE FROM procrastinate_jobs"))
            admin.execute(f"{allow} false")
            others = f"datname = '{name}' AND query NOT LIKE 'LISTEN%'"
            admin.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE {others}")
            back.start()

        async with app.open_async():
            await job.defer_async()
            await app.run_worker_async(wait=False, install_signal_handlers=False, delete_jobs="successful")
        back.join()
    with database.session() as session:
        return [*left, *session.scalars(text("SELECT status::text FROM procrastinate_jobs"))]
