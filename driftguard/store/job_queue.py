"""How procrastinate reaches the jobs that it keeps in our database."""

from __future__ import annotations

from typing import Any

from procrastinate import PsycopgConnector, SyncPsycopgConnector

from driftguard.store.database import (
    JOBS,
    Database,
    WatchedAsyncConnection,
    WatchedConnection,
    apply_settings,
    apply_settings_async,
    close_if_read_only,
    connect_parameters,
)

_POOL_CONNECTIONS = 7  # two workers with one job at a time: fetching, listening, heartbeat; one to spare
_POOL_SECONDS = 4.0  # for a connection out of the pool: a worker that is stopped asks for two in turn


def worker_connector(database: Database) -> PsycopgConnector:
    """For the process that runs jobs; open it with `App.open_async`."""
    return PsycopgConnector(
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


def _pool_arguments(database: Database) -> dict[str, Any]:
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
