"""Who scrapes a server: a session-level advisory lock per server, and who took it last.

A lock is gone at the moment its process or its connection dies, and soon after its process is frozen, so a
connection pooler between this process and the database must pool sessions, not transactions.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from typing import Final
from uuid import UUID

from sqlalchemy import Connection, Text, bindparam, delete, func, select, text
from sqlalchemy.dialects.postgresql import ARRAY, insert
from sqlalchemy.orm import Session

from driftguard.errors import DatabaseUnavailable
from driftguard.store.database import CHECK, Database
from driftguard.store.sources import FORGOTTEN_AFTER
from driftguard.store.tables import ScrapeLease, Source

FROZEN_AFTER: Final = "30s"  # without a statement: who holds locks looks after them every few seconds

_SERVERS = bindparam("servers", type_=ARRAY(Text))
_TRY_LOCK = text(
    """
    SELECT server, pg_try_advisory_lock(hashtextextended('driftguard scraping ' || server, 0))
    FROM unnest(:servers) AS server
    """
).bindparams(_SERVERS)
_COUNT_HELD = text(
    """
    SELECT count(*) FROM pg_locks, unnest(:servers) AS server
    WHERE locktype = 'advisory' AND granted AND pid = pg_backend_pid()
      AND ((classid::bigint << 32) | objid::bigint)
          = hashtextextended('driftguard scraping ' || server, 0)
    """
).bindparams(_SERVERS)
_HELD_BY_ANY = text(
    """
    SELECT server FROM unnest(:servers) AS server
    WHERE hashtextextended('driftguard scraping ' || server, 0) IN (
        SELECT (classid::bigint << 32) | objid::bigint FROM pg_locks
        JOIN pg_database ON pg_database.oid = pg_locks.database AND datname = current_database()
        WHERE locktype = 'advisory' AND granted AND objsubid = 1
    )
    """
).bindparams(_SERVERS)
_END_WHEN_FROZEN = text("SELECT set_config('idle_session_timeout', :after, false)")
_UNLOCK_ALL = text("SELECT pg_advisory_unlock_all()")


class LeaseLocks:
    """The locks that one connection holds. Every call raises DatabaseUnavailable once it is gone. Not to be
    used by two threads at once."""

    def __init__(self, database: Database) -> None:
        self._database = database
        self.held: frozenset[str] = frozenset()
        with database.reachable(CHECK):
            self._connection = database.engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            database.limit(self._connection, CHECK)
            self._connection.detach()  # closing it ends the session, and every lock with it
            self._connection.execute(_END_WHEN_FROZEN, {"after": FROZEN_AFTER})

    def check(self) -> None:
        """Returns while every lock is held."""
        with self._session() as connection:
            found = connection.scalar(_COUNT_HELD, {"servers": sorted(self.held)})
        if found != len(self.held):
            raise DatabaseUnavailable("the locks of scraped servers are gone: the connection was replaced")

    def take(self, servers: Collection[str]) -> frozenset[str]:
        """Of these servers those that nobody else holds."""
        with self._session() as connection:
            rows = connection.execute(_TRY_LOCK, {"servers": sorted(servers)}).all()
        taken = frozenset(server for server, is_free in rows if is_free)
        self.held |= taken
        return taken

    def last_leases(self, servers: Collection[str]) -> dict[str, UUID]:
        """Of those servers that ever had one."""
        query = select(ScrapeLease.server, ScrapeLease.turn).where(ScrapeLease.server.in_(servers))
        with self._session() as connection:
            return {row.server: row.turn for row in connection.execute(query)}

    def write(self, servers: Collection[str], lease: UUID, sidecar: str, now: datetime) -> None:
        """Notes the lease of these servers, which are held here, and who has it. Of servers that are
        forgotten the lease goes too: also by the clock of the database, as this one may be ahead."""
        values = {"turn": lease, "sidecar": sidecar, "taken_at": now}
        statement = insert(ScrapeLease).values([{"server": server, **values} for server in servers])
        forgotten = delete(ScrapeLease).where(
            ScrapeLease.taken_at < func.least(now, func.now()) - FORGOTTEN_AFTER,
            ScrapeLease.server.not_in(select(Source.server)),
        )
        with self._session() as connection:
            connection.execute(statement.on_conflict_do_update(index_elements=["server"], set_=values))
            connection.execute(forgotten)

    def close(self) -> None:
        """Gives every lock back. At once: the session outlives its connection by a moment."""
        with suppress(DatabaseUnavailable), self._session() as connection:  # else they are gone already
            connection.execute(_UNLOCK_ALL)
        self._connection.close()

    @contextmanager
    def _session(self) -> Iterator[Connection]:
        if self._connection.invalidated:  # SQLAlchemy would connect again, without the locks
            raise DatabaseUnavailable("the connection that held the scraped servers is gone")
        with self._database.reachable(CHECK):
            yield self._connection


def scraped_now(session: Session, servers: Collection[str]) -> frozenset[str]:
    """Of these servers those that a sidecar which runs scrapes, whatever its clock says."""
    return frozenset(session.scalars(_HELD_BY_ANY, {"servers": sorted(servers)}))


def sidecars(session: Session) -> dict[str, str]:
    """Server -> the sidecar that has its lease, or had it last."""
    query = select(ScrapeLease.server, ScrapeLease.sidecar)
    return {row.server: row.sidecar for row in session.execute(query)}
