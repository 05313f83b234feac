"""Locks of the database that one transaction holds at a time, over all processes, until it ends."""

from __future__ import annotations

from datetime import datetime
from typing import Final, NamedTuple

from sqlalchemy import BigInteger, DateTime, Float, Integer, TextClause, bindparam, text

from driftguard.store.database import Work

# Without being a superuser, sessions of one's own role may be seen and ended.
_TAKE_LOCK: Final = text(
    """
    SELECT pg_backend_pid(), now(), pg_postmaster_start_time(),
    CASE WHEN NOT pg_try_advisory_xact_lock(:key) THEN (
        SELECT pg_advisory_xact_lock(:key)::text
        FROM (
            SELECT count(pg_terminate_backend(holder.pid)) AS ended
            FROM pg_locks AS held JOIN pg_stat_activity AS holder USING (pid)
            WHERE held.locktype = 'advisory' AND held.granted AND held.objsubid = 1
              AND held.database = (SELECT oid FROM pg_database WHERE datname = current_database())
              AND ((held.classid::bigint << 32) | held.objid::bigint) = :key
              AND holder.usename = current_user
              AND (
                  (holder.pid, holder.xact_start) = (:abandoned_pid, :abandoned_since)
                  AND holder.wait_event IS DISTINCT FROM 'SyncRep'  -- ended, it would be committed
                  OR holder.state = 'active' AND holder.wait_event = 'ClientRead'
                  AND holder.state_change < clock_timestamp() - make_interval(secs => :silence_seconds)
              )
        ) AS silent
        WHERE ended >= 0  -- so that the lock is waited for afterwards
    ) END
    """
)


class Transaction(NamedTuple):
    """`since`: when it began. `server`: when its server started. Where that is another time than before, a
    standby may have taken over that lacks the last commits: nothing that is remembered may be true of it."""

    pid: int | None = None
    since: datetime | None = None
    server: datetime | None = None


def taking_lock(key: int, work: Work) -> TextClause:
    """The statement that takes an advisory lock until the transaction ends, and gives the columns of which
    one that is, as `Transaction` has them.

    It waits for the holder, but ends one that has sent half of a message and no more for longer than `work`
    waits. No limit of the server ends that: a cancelled statement waits for the rest, and the session is not
    idle. Nor do keepalives where a pooler is in between, or a frozen process whose kernel answers them.
    Executed with `abandoned_pid` and `abandoned_since`, it also ends that transaction, if it is the holder
    and its commit waits for no standby.
    """
    return _TAKE_LOCK.bindparams(
        bindparam("key", key, BigInteger),
        bindparam("silence_seconds", work.silence_seconds, Float),
        bindparam("abandoned_pid", None, Integer),
        bindparam("abandoned_since", None, DateTime(timezone=True)),
    )
