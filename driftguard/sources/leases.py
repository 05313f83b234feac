"""Several sidecars on one database may have the same sources: one of them scrapes a server, the others wait.

A lease lasts as long as its advisory lock. A window is passed on only after a check, later than its readings,
that the lock is still held. The holder of the next lease begins with an even later reading. So no two windows
of a server overlap, however a lease ends.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final
from uuid import UUID, uuid4

import structlog

from driftguard.errors import DatabaseUnavailable
from driftguard.records import AcceptanceRecord
from driftguard.sources.scrape import Submit
from driftguard.sources.window_buffer import WindowBuffer
from driftguard.store.database import Database
from driftguard.store.scrape_leases import LeaseLocks

LOOK_SECONDS: Final = 2.0  # between two checks whether the locks are held, and whether others are free
log = structlog.get_logger(__name__)


class _Holding:
    """One connection with its locks, and the windows that were scraped under them."""

    def __init__(self, locks: LeaseLocks, later: Callable[..., Future[Any]], submit: Submit) -> None:
        self.locks = locks
        self.is_lost = False
        self._windows = WindowBuffer(lambda records: later(self._checked, submit, records))

    def submit(self, records: Sequence[AcceptanceRecord]) -> Future[Any]:
        """Raises DatabaseUnavailable: the lease has ended."""
        if self.is_lost:
            raise DatabaseUnavailable("the connection that held this server was lost after it was scraped")
        return self._windows.submit(records)

    def flush(self) -> None:
        self._windows.flush()

    def _checked(self, submit: Submit, records: Sequence[AcceptanceRecord]) -> Any:
        self.locks.check()
        return submit(records).result()


@dataclass(frozen=True, slots=True)
class Lease:
    """`id` changes whenever another sidecar may have scraped the server meanwhile."""

    id: UUID
    began_at: datetime  # of this connection
    submit: Submit


class ScrapeLeases:
    """`look` takes leases and notices their end. Its database calls are made on one thread."""

    def __init__(self, database: Database, servers: Sequence[str], submit: Submit) -> None:
        self._database = database
        self._servers = servers
        self._submit = submit
        self._sidecar = f"{socket.gethostname()}, process {os.getpid()}"
        self._ids: dict[str, UUID] = {}  # of the leases held last
        self._leases: dict[str, Lease] = {}
        self._holding: _Holding | None = None
        self._waiting: tuple[str, ...] = ()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scraping-turns")

    def of(self, server: str) -> Lease | None:
        """None: another sidecar scrapes it, or the database is unavailable."""
        return self._leases.get(server)

    @property
    def waiting(self) -> tuple[str, ...]:
        """Servers that another sidecar scrapes."""
        return self._waiting

    async def look(self) -> None:
        """Checks the locks, and takes those that are free. Without the database there is no lease."""
        try:
            await asyncio.wrap_future(self._thread.submit(self._look))
        except DatabaseUnavailable as error:
            self._lose(error)

    def flush(self) -> None:
        """Passes the scraped windows on."""
        if self._holding is not None:
            self._holding.flush()

    def stop(self) -> None:
        """Releases the leases, so that another sidecar takes over at once."""
        self._thread.submit(self._close)
        self._thread.shutdown()

    def _look(self) -> None:
        if self._holding is None:
            locks = LeaseLocks(self._database)
            self._holding = _Holding(locks, self._thread.submit, self._submit)
        locks = self._holding.locks
        locks.check()
        wanted = [server for server in self._servers if server not in self._leases]
        taken = locks.take(wanted) if wanted else frozenset()
        if taken:
            self._begin(self._holding, taken)
        waiting = tuple(server for server in wanted if server not in taken)
        if waiting and waiting != self._waiting:
            log.warning("another sidecar on this database scrapes", servers=waiting)
        self._waiting = waiting

    def _begin(self, holding: _Holding, taken: frozenset[str]) -> None:
        locks, now = holding.locks, datetime.now(UTC)
        last = locks.last_leases(taken)
        changed = [
            server for server in sorted(taken) if server not in last or last[server] != self._ids.get(server)
        ]
        if changed:
            lease = uuid4()
            locks.write(changed, lease, self._sidecar, now)
            self._ids.update(dict.fromkeys(changed, lease))
        begin = partial(Lease, began_at=now, submit=holding.submit)
        self._leases = {**self._leases, **{server: begin(self._ids[server]) for server in taken}}
        log.info("this sidecar scrapes", servers=sorted(taken))

    def _close(self) -> None:
        if self._holding is not None:
            self._holding.locks.close()

    def _lose(self, error: DatabaseUnavailable) -> None:
        holding, self._holding, self._leases = self._holding, None, {}
        if holding is not None:
            log.warning("scraping waits for the database", error=error.detail)
            holding.flush()  # its check fails, which ends the waiting futures
            holding.is_lost = True
            self._thread.submit(holding.locks.close)
