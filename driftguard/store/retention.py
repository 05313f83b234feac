"""What recurs hourly: partitions ahead of time, and the removal of what is past retention.

Nothing here holds what ingest waits for: the ingest lock is taken for the moment in which a partition is
attached, and no other. A partition is dropped in three steps, and where one call ends early, the next goes
on: it is marked with a comment; detached `CONCURRENTLY`, which waits for its readers without holding a lock
that others need; and dropped, which no longer concerns the partitioned table.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final

import structlog
from psycopg.errors import LockNotAvailable
from sqlalchemy import Connection, text
from sqlalchemy.exc import OperationalError

from driftguard.records import FUTURE_TOLERANCE
from driftguard.settings import RetentionSettings
from driftguard.store import sources
from driftguard.store.database import MAINTENANCE, Database
from driftguard.store.partitions import (
    OF_TIERS,
    RECORDS,
    PartitionedTable,
    ensure_days,
    missing_for,
    take_ingest_lock,
)
from driftguard.store.rollup_tiers import TIERS

_MAINTENANCE_LOCK = 0x6472696674_05  # "drift" + 5: one sidecar at a time removes
_MARK: Final = "driftguard: past retention, to be dropped"
# A record that was just young enough when it came has still to be stored, also by another sidecar's clock.
_GRACE: Final = timedelta(hours=1)
# Attaching, and completing a detachment, lock the table against being partitioned otherwise while they wait.
_PARTITIONING_LOCK = "SET LOCAL lock_timeout = '1s'"
CAPTURES_AT_ONCE: Final = 1_000
_PARTITIONS: Final = (
    "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
    "WHERE i.inhparent = CAST(:table AS regclass)"
)
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Maintenance:
    """Names of partitions, and how many captured requests and counts of unrecorded ones were deleted."""

    created: list[str]
    dropped: list[str]
    captures_deleted: int
    unrecorded_deleted: int


def maintain(database: Database, now: datetime, retention: RetentionSettings) -> Maintenance:
    """Creates partitions ahead of `now` and removes what is past retention. Raises DatabaseUnavailable."""
    created = create_ahead(database, now, retention.partitions_ahead)
    with _alone(database) as connection:
        if connection is None:
            return Maintenance(created, [], 0, 0)
        there: datetime = connection.execute(text("SELECT clock_timestamp()")).scalar_one()
        _date_back_captures(connection, max(now, there))
        now = _not_ahead(now, there)
        # First what may hold text: whatever keeps the others from being removed, this goes in time.
        captures = _delete_captures(connection, now - timedelta(days=retention.captures_days))
        unrecorded = _delete_unrecorded(connection, now - timedelta(days=retention.records_days))
        dropped = _drop_marked(database, connection)
        for table, days in _kept(retention):
            if _complete_detachment(database, table):
                oldest = now - timedelta(days=days) - _GRACE
                _detach_old(connection, table, oldest.astimezone(UTC).date())
        dropped += _drop_marked(database, connection)
        connection.execute(sources.forgotten(now))  # where none is scraped any more, nobody else does it
        return Maintenance(created, dropped, captures, unrecorded)


def create_ahead(database: Database, now: datetime, days_ahead: int) -> list[str]:
    """Makes the partitions of today and the days ahead that are missing. Ingest makes one itself where this
    could not, and is locked out for no longer than that takes."""
    today = now.astimezone(UTC).date()
    created: list[str] = []
    for day in (today + timedelta(days=ahead) for ahead in range(days_ahead + 1)):
        with database.session(MAINTENANCE) as session:
            if not missing_for(session, [day]):
                continue
            with _unless_locked("create", str(day)), session.begin_nested():
                take_ingest_lock(session)
                session.execute(text(_PARTITIONING_LOCK))
                created += [part.name for part in ensure_days(session, [day])]
    return created


def _kept(retention: RetentionSettings) -> Iterator[tuple[PartitionedTable, int]]:
    """With the days that each is kept."""
    yield RECORDS, retention.records_days
    for tier in TIERS.values():
        yield OF_TIERS[tier.resolution], tier.days_kept(retention)


@contextmanager
def _alone(database: Database) -> Iterator[Connection | None]:
    """A connection on which each statement is a transaction; None while another sidecar is at it."""
    with database.connect(MAINTENANCE) as pooled:
        connection = pooled.execution_options(isolation_level="AUTOCOMMIT")
        key = {"key": _MAINTENANCE_LOCK}
        if not connection.scalar(text("SELECT pg_try_advisory_lock(:key)"), key):
            yield None
            return
        try:
            yield connection
        finally:
            if not connection.invalidated:
                connection.execute(text("SELECT pg_advisory_unlock(:key)"), key)


def _date_back_captures(connection: Connection, now: datetime) -> None:
    """Those that a clock which was ahead has dated would be kept for longer than is promised."""
    later = text("UPDATE captures SET captured_at = :now WHERE captured_at > :latest")
    connection.execute(later, {"now": now, "latest": now + FUTURE_TOLERANCE})


def _not_ahead(now: datetime, there: datetime) -> datetime:
    """What is removed does not come back: where this clock is ahead of the database's, that one decides."""
    if now > there + FUTURE_TOLERANCE:
        _log.warning(
            "retention_by_the_clock_of_the_database", ahead_seconds=round((now - there).total_seconds())
        )
    return min(now, there)


def _complete_detachment(database: Database, table: PartitionedTable) -> bool:
    """Of a partition at which an earlier call ended; while there is one, no other can be detached. False: it
    still has to wait for a transaction that is older."""
    with database.session(MAINTENANCE) as session:
        pending = session.scalar(text(f"{_PARTITIONS} AND i.inhdetachpending"), {"table": table.name})
        if pending is None:
            return True
        with _unless_locked("detach", table.name), session.begin_nested():
            session.execute(text(_PARTITIONING_LOCK))
            session.execute(text(f"ALTER TABLE {table.name} DETACH PARTITION {pending} FINALIZE"))
            return True
    return False


def _detach_old(connection: Connection, table: PartitionedTable, edge: date) -> None:
    """Detaches what ends at `edge` or before, the oldest first, until one waits for a reader too long."""
    names = connection.scalars(text(_PARTITIONS), {"table": table.name}).all()
    ends = {name: end for name in names if (end := table.end_of(name)) and end <= edge}
    with _unless_locked("detach", table.name):
        for name in sorted(ends, key=lambda name: ends[name]):
            connection.execute(text(f"COMMENT ON TABLE {name} IS '{_MARK}'"))
            connection.execute(text(f"ALTER TABLE {table.name} DETACH PARTITION {name} CONCURRENTLY"))


def _drop_marked(database: Database, connection: Connection) -> list[str]:
    """Drops what is marked and detached."""
    marked = text(
        "SELECT c.relname FROM pg_description d JOIN pg_class c ON c.oid = d.objoid "
        "WHERE d.classoid = 'pg_class'::regclass AND d.objsubid = 0 AND d.description = :mark "
        "AND NOT c.relispartition AND pg_table_is_visible(c.oid) ORDER BY c.relname"
    )
    dropped = []
    for name in connection.scalars(marked, {"mark": _MARK}).all():
        with (
            database.session(MAINTENANCE) as session,
            _unless_locked("drop", name),
            session.begin_nested(),
        ):
            session.execute(text(f"LOCK TABLE {name} IN ACCESS EXCLUSIVE MODE"))
            if name in session.scalars(marked, {"mark": _MARK}):  # else ingest has just attached it again
                session.execute(text(f"DROP TABLE {name}"))
                dropped.append(name)
    return dropped


def _delete_captures(connection: Connection, edge: datetime) -> int:
    """In batches, each a transaction, so that none is long."""
    batch = text(
        "DELETE FROM captures WHERE id = ANY(ARRAY("
        "SELECT id FROM captures WHERE captured_at < :edge ORDER BY captured_at LIMIT :limit))"
    )
    deleted = 0
    while True:
        rows = connection.execute(batch, {"edge": edge, "limit": CAPTURES_AT_ONCE}).rowcount
        deleted += rows
        if rows < CAPTURES_AT_ONCE:
            return deleted


def _delete_unrecorded(connection: Connection, edge: datetime) -> int:
    """A few rows of each hour, so all at once."""
    old = text("DELETE FROM unrecorded_requests WHERE hour < :edge")
    return connection.execute(old, {"edge": edge}).rowcount


@contextmanager
def _unless_locked(step: str, what: str) -> Iterator[None]:
    """What waits too long for a lock is left to the next call."""
    try:
        yield
    except OperationalError as error:
        if not isinstance(error.orig, LockNotAvailable):
            raise
        _log.warning("retention_waits_for_a_reader", step=step, of=what)
