"""The daily partitions of `records`: made ahead and on demand, dropped when they are past retention.

Days are UTC days of `ended_at`. A partition is made as a table of its own and then attached, because
`CREATE TABLE ... PARTITION OF` would wait for every reader of `records`, and ATTACH does not.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

import structlog
from psycopg.errors import LockNotAvailable
from sqlalchemy import CursorResult, Delete, delete, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import Session

from driftguard.settings import RetentionSettings
from driftguard.store.tables import Capture, Rollup

_INGEST_LOCK = 0x6472696674_02  # "drift" + 2
_NAME = re.compile(r"records_(\d{4})(\d\d)(\d\d)")
_DROP_LOCK_TIMEOUT = "2s"  # dropping waits for readers, and ingest behind it; the next call tries again
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Maintenance:
    """What one call of `maintain` did."""

    created: list[date]
    dropped: list[date]
    rollups_deleted: int
    captures_deleted: int


def take_ingest_lock(session: Session) -> None:
    """One writer at a time until this transaction ends, so that `seq` rises in commit order."""
    session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _INGEST_LOCK})


def oldest_kept(now: datetime, retention: RetentionSettings) -> datetime:
    """A record that ended before this moment is past retention and is refused."""
    return now - timedelta(days=retention.records_days)


def existing_days(session: Session) -> set[date]:
    names = session.scalars(
        text(
            "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
            "WHERE i.inhparent = 'records'::regclass"
        )
    )
    found = (_NAME.fullmatch(name) for name in names)
    return {date(int(match[1]), int(match[2]), int(match[3])) for match in found if match}


def ensure_days(session: Session, days: Iterable[date]) -> list[date]:
    """Creates the partitions that are missing; the caller holds the ingest lock. Returns the new days."""
    missing = sorted(set(days) - existing_days(session))
    for day in missing:
        name = _partition(day)
        session.execute(text(f"CREATE TABLE {name} (LIKE records INCLUDING DEFAULTS INCLUDING CONSTRAINTS)"))
        session.execute(
            text(
                f"ALTER TABLE records ATTACH PARTITION {name} "
                f"FOR VALUES FROM ('{day}T00:00:00Z') TO ('{day + timedelta(days=1)}T00:00:00Z')"
            )
        )
    return missing


def maintain(session: Session, now: datetime, retention: RetentionSettings) -> Maintenance:
    """Creates partitions ahead of `now` and removes what is past retention. Call it at start and hourly."""
    take_ingest_lock(session)
    today = now.astimezone(UTC).date()
    created = ensure_days(
        session, (today + timedelta(days=ahead) for ahead in range(retention.partitions_ahead + 1))
    )
    dropped = _drop_old(session, oldest_kept(now, retention))
    rollups = delete(Rollup).where(Rollup.minute < now - timedelta(days=retention.rollups_days))
    captures = delete(Capture).where(Capture.captured_at < now - timedelta(days=retention.captures_days))
    return Maintenance(created, dropped, _rows(session, rollups), _rows(session, captures))


def _drop_old(session: Session, oldest: datetime) -> list[date]:
    # A day goes when all of it is past retention: no record that is still accepted could need it.
    old = sorted(day for day in existing_days(session) if day < oldest.astimezone(UTC).date())
    if not old:
        return []
    try:
        with session.begin_nested():
            session.execute(text(f"SET LOCAL lock_timeout = '{_DROP_LOCK_TIMEOUT}'"))
            for day in old:
                session.execute(text(f"DROP TABLE {_partition(day)}"))
    except OperationalError as error:
        if not isinstance(error.orig, LockNotAvailable):
            raise
        _log.warning("retention_waits_for_a_reader", partitions=[_partition(day) for day in old])
        return []
    return old


def _rows(session: Session, statement: Delete) -> int:
    result = session.execute(statement)
    assert isinstance(result, CursorResult)  # noqa: S101 (what a DELETE gives)
    return result.rowcount


def _partition(day: date) -> str:
    return f"records_{day:%Y%m%d}"
