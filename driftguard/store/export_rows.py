"""Records and rollups as they leave: in keyset pages, with the names of their stream."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Any, NamedTuple

import msgspec
from sqlalchemy import ColumnElement, func, select, text, tuple_
from sqlalchemy.orm import Session

from driftguard.records import AcceptanceRecord, Instant
from driftguard.store.rollup_tiers import Tier
from driftguard.store.row_filter import RowFilter, RowId, StoredText
from driftguard.store.tables import Record, RollupTier, Stream

_OF_STREAM = ("server", "target", "draft", "draft_version", "method")
_OF_RECORD = tuple(name for name in AcceptanceRecord.__struct_fields__ if name not in _OF_STREAM)
_RECORD_COLUMNS = [getattr(Stream, name) for name in _OF_STREAM] + [
    getattr(Record, name) for name in _OF_RECORD
]


class RollupRow(msgspec.Struct, frozen=True):
    """One minute, hour or day (UTC) of one segment: sums over the records that ended in it. `minute` is its
    first minute.

    `acceptance_buckets` counts records by accepted / drafted in steps of 1/20 (those that drafted nothing are
    in none). The sums of times are in seconds and over the records that gave the time, which `_count` counts:
    requests / sum of times per output token is tokens per second. The one that runs still grows.
    """

    minute: datetime
    stream_id: int
    server: str
    target: str
    draft: str
    draft_version: str
    method: str
    segment: str
    kind: str
    records: int
    steps: int
    drafted: int
    accepted: int
    emitted: int
    output_tokens: int
    acceptance_buckets: list[int]
    drafted_per_position: list[int] | None
    accepted_per_position: list[int] | None
    time_per_output_token_sum: float
    time_per_output_token_count: int
    time_to_first_token_sum: float
    time_to_first_token_count: int


class RollupKey(NamedTuple):
    """Of the last rollup of the page before: in order of time, then of the rest."""

    minute: Instant
    stream_id: RowId
    segment: StoredText
    kind: StoredText


class RecordKey(NamedTuple):
    """Of the last record of the page before: in the order of arrival."""

    seq: RowId


def walk_in_order(session: Session) -> None:
    """Makes the reads of this unit of work follow the index, for one page after the other until the end.

    Where the planner knows little of a table it sorts all that is left for every page, which is quadratic.
    """
    session.execute(text("SET LOCAL enable_sort = off"))


def newest_seq(session: Session) -> int:
    """Of the last record that arrived; 0 where there is none."""
    return session.scalar(select(func.max(Record.seq))) or 0


def records(
    session: Session, wanted: RowFilter, *, after: RecordKey | None, limit: int, up_to: int | None = None
) -> list[tuple[RecordKey, AcceptanceRecord]]:
    """The next records in the order of arrival, none that arrived after `up_to`; wanted by the time at which
    they ended."""
    query = (
        select(Record.seq, *_RECORD_COLUMNS)
        .join(Stream, Stream.id == Record.stream_id)
        .where(Record.seq > (after.seq if after else 0))
        .where(*wanted.at(Record.ended_at), *_traffic(wanted, Record))
        .order_by(Record.seq)
        .limit(limit)
    )
    if up_to is not None:
        query = query.where(Record.seq <= up_to)
    names = (*_OF_STREAM, *_OF_RECORD)
    return [
        (RecordKey(seq), AcceptanceRecord(**dict(zip(names, values, strict=True))))
        for seq, *values in session.execute(query)
    ]


def rollups(
    session: Session, tier: Tier, wanted: RowFilter, *, after: RollupKey | None, limit: int
) -> list[tuple[RollupKey, RollupRow]]:
    """The next rollups, oldest first."""
    table = tier.table
    key = (table.minute, table.stream_id, table.segment, table.kind)
    names = RollupRow.__struct_fields__
    columns = [getattr(Stream if name in _OF_STREAM else table, name) for name in names]
    query = select(*columns).join(Stream, Stream.id == table.stream_id)
    if after is not None:
        query = query.where(tuple_(*key) > after)
    query = query.where(*wanted.at(table.minute), *_traffic(wanted, table)).order_by(*key).limit(limit)
    found = (RollupRow(*values) for values in session.execute(query))
    return [(RollupKey(row.minute, row.stream_id, row.segment, row.kind), row) for row in found]


def _traffic(wanted: RowFilter, table: type[Record | RollupTier]) -> Iterator[ColumnElement[bool]]:
    chosen: list[tuple[Any, Any]] = [
        (table.stream_id, wanted.streams),
        (table.segment, wanted.segments),
        (table.kind, wanted.kinds),
    ]
    for column, values in chosen:
        if values:
            yield column.in_(values)
    yield from wanted.of(Stream.server, Stream.target)
