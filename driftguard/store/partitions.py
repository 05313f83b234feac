"""The partitions of `records` and of the rollups: made ahead and on demand. Retention drops them.

Each is one day, month or year of UTC. A partition is made as a table of its own and then attached, because
`CREATE TABLE ... PARTITION OF` would wait for every reader of the table, and ATTACH does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from typing import Final, Literal

from sqlalchemy import text
from sqlalchemy.orm import Session

from driftguard.settings import RetentionSettings
from driftguard.store.advisory_locks import Transaction, taking_lock
from driftguard.store.database import INGEST
from driftguard.store.rollup_tiers import Resolution

_INGEST_LOCK = taking_lock(0x6472696674_02, INGEST)  # "drift" + 2
_DAY = timedelta(days=1)
# Each batch updates its rollups again. Where a page has room for a second version of all its rows, they stay
# on it and no index is written; on full pages every row would move with every batch.
_ROLLUP_FILLFACTOR: Final = 50
_FORMATS: Final = {"day": "%Y%m%d", "month": "%Y%m", "year": "%Y"}
# The rollups that were not partitioned yet, as migration 0015 kept them: all before the day in the name.
_UNDIVIDED: Final = "rollups_1m_until_"


@dataclass(frozen=True, slots=True)
class Partition:
    """From the first moment of `start` to that of `end`."""

    table: str
    name: str
    start: date
    end: date


@dataclass(frozen=True, slots=True)
class PartitionedTable:
    name: str
    unit: Literal["day", "month", "year"]

    def partition(self, day: date) -> Partition:
        """The one that holds this day."""
        match self.unit:
            case "day":
                start, end = day, day + _DAY
            case "month":
                start = day.replace(day=1)
                end = (start + timedelta(days=31)).replace(day=1)
            case "year":
                start = day.replace(month=1, day=1)
                end = start.replace(year=start.year + 1)
        return Partition(self.name, f"{self.name}_{start.strftime(_FORMATS[self.unit])}", start, end)

    def end_of(self, name: str) -> date | None:
        """Of a partition by its name; None where the name is none of ours."""
        if name.startswith(_UNDIVIDED):
            return _date(name.removeprefix(_UNDIVIDED), _FORMATS["day"])
        start = _date(name.removeprefix(f"{self.name}_"), _FORMATS[self.unit])
        return self.partition(start).end if start else None


RECORDS: Final = PartitionedTable("records", "day")
MINUTES: Final = PartitionedTable("rollups_1m", "day")
OF_TIERS: Final[dict[Resolution, PartitionedTable]] = {
    "minute": MINUTES,
    "hour": PartitionedTable("rollups_1h", "month"),
    "day": PartitionedTable("rollups_1d", "year"),
}
_PARTITIONED: Final = (RECORDS, *OF_TIERS.values())


def take_ingest_lock(session: Session, before: Transaction = Transaction()) -> Transaction:
    """One writer at a time until this transaction ends, so that `seq` rises in commit order. Returns it;
    `before`: the caller's last one, which is ended where it still holds the lock: its connection failed."""
    taken = session.execute(_INGEST_LOCK, {"abandoned_pid": before.pid, "abandoned_since": before.since})
    return Transaction(*taken.one()[:3])


def oldest_kept(now: datetime, retention: RetentionSettings) -> datetime:
    """A record that ended before this moment is past retention and is refused."""
    return now - timedelta(days=retention.records_days)


def ensure_days(session: Session, days: Iterable[date]) -> list[Partition]:
    """Makes what records that end on these days need and what is not there; the caller holds the ingest lock.

    A partition that retention detached and has not dropped yet comes back with its rows.
    """
    made = missing_for(session, days)
    for part in made:
        like = f"LIKE {part.table} INCLUDING DEFAULTS INCLUDING CONSTRAINTS"
        fill = 100 if part.table == RECORDS.name else _ROLLUP_FILLFACTOR
        within = f"FROM ('{part.start}T00:00:00Z') TO ('{part.end}T00:00:00Z')"
        session.execute(text(f"CREATE TABLE IF NOT EXISTS {part.name} ({like}) WITH (fillfactor = {fill})"))
        session.execute(text(f"COMMENT ON TABLE {part.name} IS NULL"))
        session.execute(text(f"ALTER TABLE {part.table} ATTACH PARTITION {part.name} FOR VALUES {within}"))
    return made


def missing_for(session: Session, days: Iterable[date]) -> list[Partition]:
    """What records that end on these days need and is not there."""
    needed = {part.name: part for day in days for table in _PARTITIONED for part in [table.partition(day)]}
    attached = text(
        "SELECT relname FROM pg_class "
        "WHERE relname = ANY(:names) AND relispartition AND pg_table_is_visible(oid)"
    )
    for name in session.scalars(attached, {"names": list(needed)}):
        del needed[name]
    if not needed:
        return []
    undivided = _end_of_undivided(session)
    return [part for part in needed.values() if part.table != MINUTES.name or part.end > undivided]


def _end_of_undivided(session: Session) -> date:
    names = session.scalars(
        text(
            "SELECT c.relname FROM pg_inherits i JOIN pg_class c ON c.oid = i.inhrelid "
            "WHERE i.inhparent = 'rollups_1m'::regclass AND starts_with(c.relname, :undivided)"
        ),
        {"undivided": _UNDIVIDED},
    )
    return max((end for name in names if (end := MINUTES.end_of(name))), default=date.min)


def _date(written: str, format_: str) -> date | None:
    try:
        return datetime.strptime(written, format_).replace(tzinfo=UTC).date()
    except ValueError:
        return None
