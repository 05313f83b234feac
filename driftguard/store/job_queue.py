"""How procrastinate reaches the jobs that it keeps in our database."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from procrastinate import PsycopgConnector, SyncPsycopgConnector
from procrastinate.exceptions import ConnectorException
from procrastinate.jobs import Job, Status
from procrastinate.manager import JobManager
from psycopg.errors import RaiseException
from psycopg_pool import AsyncConnectionPool
from sqlalchemy import text
from sqlalchemy.orm import Session

from driftguard.errors import DriftGuardError
from driftguard.store.database import (
    JOBS,
    Database,
    WatchedAsyncConnection,
    WatchedConnection,
    apply_settings,
    apply_settings_async,
    close_if_read_only,
    connect_parameters,
    is_database_failure,
)

_POOL_CONNECTIONS = 4  # a worker with one job at a time: fetching, listening, heartbeat; one to spare
_MOST_ATTEMPTS: Final = 10
_PAUSE_SECONDS = 1.0  # before the database is told again how a job ended
_POOL_SECONDS = 4.0  # for a connection out of the pool: a worker that is stopped asks for two in turn


class _Pool(AsyncConnectionPool[Any]):
    """Ends with the task that waits for it. asyncio.wait_for, by which it waits, loses a cancellation before
    Python 3.12 (gh-86296) that comes together with what is waited for: the worker would go on for ever."""

    async def open(self, wait: bool = False, timeout: float = 30.0) -> None:  # noqa: ASYNC109 (the base's)
        asked = _cancellations()
        try:
            await super().open(wait, timeout)
            _end_if_cancelled(asked)
        except BaseException:
            await self.close()
            raise

    async def getconn(self, timeout: float | None = None) -> Any:  # noqa: ASYNC109 (the base's)
        asked = _cancellations()
        connection = await super().getconn(timeout)
        try:
            _end_if_cancelled(asked)
        except asyncio.CancelledError:
            await self.putconn(connection)
            raise
        return connection


def _cancellations() -> int:
    task = asyncio.current_task()
    return task.cancelling() if task is not None else 0


def _end_if_cancelled(asked_before: int) -> None:
    if _cancellations() > asked_before:
        raise asyncio.CancelledError


class WorkerJobs(JobManager):
    """For `App.job_manager` of a worker. Tells again how a job ended while the database cannot be told: the
    library tells it once, and a job whose end is lost counts as running for as long as its worker lives."""

    def __init__(self, connector: PsycopgConnector, is_stopping: Callable[[], bool]) -> None:
        super().__init__(connector)
        self._is_stopping = is_stopping

    async def finish_job(self, job: Job, status: Status, delete_job: bool) -> None:
        was_away = False
        while True:
            try:
                await super().finish_job(job=job, status=status, delete_job=delete_job)
            except ConnectorException as error:
                if not is_away(error):
                    if was_away and isinstance(error.__cause__, RaiseException):
                        return  # it was told, and the answer was lost
                    raise
                if self._is_stopping():
                    raise
                was_away = True
                await asyncio.sleep(_PAUSE_SECONDS)
            else:
                return


def worker_connector(database: Database) -> PsycopgConnector:
    """For the process that runs jobs; open it with `App.open_async`."""
    logging.getLogger("procrastinate.utils").addFilter(_is_news)
    logging.getLogger("procrastinate.worker").addFilter(_in_one_line)
    return PsycopgConnector(
        pool_factory=_Pool,
        min_size=1,
        connection_class=WatchedAsyncConnection,
        configure=_configure_async,
        **_pool_arguments(database),
    )


def deferring_connector(database: Database) -> SyncPsycopgConnector:
    """For code that only adds jobs; open it with `App.open`."""
    return SyncPsycopgConnector(
        min_size=0,
        connection_class=WatchedConnection,
        configure=_configure,
        reset=close_if_read_only,  # a worker's pool does not outlive an error
        **_pool_arguments(database),
    )


_LOST = text(
    """
    SELECT id, args ->> 'server', scheduled_at FROM procrastinate_jobs AS job
    WHERE task_name = :task AND scheduled_at >= now() - CAST(:oldest AS interval) AND attempts < :most
      AND (status = 'failed' OR (status = 'doing' AND NOT EXISTS (
          SELECT FROM procrastinate_workers AS worker
          WHERE worker.id = job.worker_id AND worker.last_heartbeat >= now() - interval '1 minute')))
    ORDER BY id
    """
)


class LostJob(NamedTuple):
    """asked_at: the moment that it was scheduled for."""

    id: int
    server: str
    asked_at: datetime


def lost(session: Session, task: str, oldest: timedelta) -> list[LostJob]:
    """The jobs that were scheduled for a moment within `oldest`, and whose worker was killed, or failed as
    without the database. Those that were tried often are left out."""
    rows = session.execute(_LOST, {"task": task, "oldest": oldest, "most": _MOST_ATTEMPTS})
    return [LostJob(*row) for row in rows]


def _is_news(record: logging.LogRecord) -> bool:
    """False where a task of a worker could not reach the database. The caller, whose worker ends with it,
    says so in one line; the library adds a traceback for each task."""
    error = record.exc_info[1] if record.exc_info else None
    return error is None or not is_away(error)


def is_away(error: BaseException) -> bool:
    """Whether `error`, of the library or of the driver, tells that the database could not be reached."""
    cause = error.__cause__ if isinstance(error, ConnectorException) else error
    return isinstance(cause, Exception) and is_database_failure(cause)


def _in_one_line(record: logging.LogRecord) -> bool:
    """A job that ended for a reason of ours, as the stop of its sidecar, needs no traceback."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, DriftGuardError):
        record.msg, record.exc_info = f"{record.msg}: {error}", None
    return True


def _pool_arguments(database: Database) -> dict[str, Any]:
    # Who waits for a connection says that there is none; the library adds several lines for each attempt.
    logging.getLogger("psycopg.pool").setLevel(logging.ERROR)
    return {
        "conninfo": database.libpq_url,
        "kwargs": connect_parameters(database.url.query),
        "max_size": _POOL_CONNECTIONS,
        "timeout": _POOL_SECONDS,
    }


def _configure(connection: WatchedConnection) -> None:
    apply_settings(connection)
    apply_settings(connection, JOBS)
    connection.silence_seconds = JOBS.silence_seconds


async def _configure_async(connection: WatchedAsyncConnection) -> None:
    await apply_settings_async(connection, JOBS)
    connection.silence_seconds = JOBS.silence_seconds
