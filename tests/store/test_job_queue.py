"""What the log says of the workers of jobs while the database is away."""

from __future__ import annotations

import asyncio

import psycopg
import pytest
from procrastinate.exceptions import ConnectorException
from procrastinate.utils import cancel_and_capture_errors

from driftguard.store.database import Database
from driftguard.store.job_queue import worker_connector


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
