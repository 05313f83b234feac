"""How procrastinate reaches the jobs that it keeps in our database."""

from __future__ import annotations

from procrastinate import PsycopgConnector, SyncPsycopgConnector

from driftguard.store.database import Database

_POOL_CONNECTIONS = 4  # a worker with one job at a time: fetching, listening, heartbeat, one to spare


def worker_connector(database: Database) -> PsycopgConnector:
    """For the process that runs jobs; open it with `App.open_async`."""
    return PsycopgConnector(conninfo=database.libpq_url, min_size=1, max_size=_POOL_CONNECTIONS)


def deferring_connector(database: Database) -> SyncPsycopgConnector:
    """For code that only adds jobs; open it with `App.open`."""
    return SyncPsycopgConnector(conninfo=database.libpq_url, min_size=0, max_size=_POOL_CONNECTIONS)
