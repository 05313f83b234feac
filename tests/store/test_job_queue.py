"""The workers of jobs: their connections, and what the log says while the database is away."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import psycopg
import pytest
from procrastinate import App
from procrastinate.exceptions import ConnectorException
from procrastinate.utils import cancel_and_capture_errors

from driftguard.store import job_queue
from driftguard.store.database import Database
from driftguard.store.job_queue import deferring_connector, worker_connector


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
