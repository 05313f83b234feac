"""One process at a time replays the canary probes of a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from driftguard.errors import Conflict
from driftguard.store.database import CHECK, Database

_TRY_LOCK = text("SELECT pg_try_advisory_lock(hashtextextended(:key, 0))")
_UNLOCK = text("SELECT pg_advisory_unlock(hashtextextended(:key, 0))")


@contextmanager
def replaying(database: Database, server: str) -> Iterator[None]:
    """Holds a session-level advisory lock, which ends with its connection. Raises Conflict: another process
    holds it; DatabaseUnavailable."""
    key = {"key": f"driftguard probing {server}"}
    with database.connect(CHECK) as pooled:
        connection = pooled.execution_options(isolation_level="AUTOCOMMIT")
        connection.detach()  # closing it ends the session, and the lock with it
        if not connection.scalar(_TRY_LOCK, key):
            raise Conflict(f"another process replays the canary probes of {server} just now")
        try:
            yield
        finally:  # the server notices only a while later that a connection was closed
            with suppress(DBAPIError):
                connection.execute(_UNLOCK, key)
