"""Streams, at most as many as the settings allow, and their segments: at most 64 named ones per stream, the
rest are stored as 'other'."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields
from datetime import datetime, timedelta
from typing import Final, Literal

from sqlalchemy import ARRAY, ColumnElement, Text, func, insert, literal, or_, select, tuple_, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from driftguard.adapters.window import Drafted
from driftguard.records import (
    FUTURE_TOLERANCE,
    MAX_SEGMENTS_PER_STREAM,
    OTHER_SEGMENT,
    AcceptanceRecord,
    StreamKey,
)
from driftguard.store.advisory_locks import Transaction
from driftguard.store.tables import Segment, Stream

RelearningReason = Literal["other_version", "damaged"]
RELEARNING: Final[dict[RelearningReason, str]] = {  # in words, of the stored detector state
    "other_version": "stored by another version of DriftGuard; baselines are relearned",
    "damaged": "the stored detector state is damaged; baselines are relearned",
}


@dataclass(slots=True)
class KnownStream:
    """A stream's id and the segments it has; more segments than the limit go to 'other'."""

    id: int
    segments: set[str] = field(default_factory=set)

    def place(self, segment: str) -> str:
        return segment if segment in self.segments else OTHER_SEGMENT


@dataclass(slots=True)
class StreamRegistry:
    """The writer's memory of streams and segments. `max_streams`: rows of streams; None: any number.
    `transaction`: the writer's last one.

    Rows only grow, so what is remembered stays true; except what a transaction that failed had added, or one
    that the standby lacks that took over: after either all streams are forgotten, and found again in the
    database.
    """

    max_streams: int | None = None
    streams: dict[StreamKey, KnownStream] = field(default_factory=dict)
    transaction: Transaction = field(default_factory=Transaction)

    def begin(self, transaction: Transaction) -> None:
        """The writer has begun this one."""
        if transaction.server != self.transaction.server:
            self.forget()
        self.transaction = transaction

    def forget(self) -> None:
        """After a transaction that failed."""
        self.streams.clear()

    def register(
        self, session: Session, records: Iterable[AcceptanceRecord], now: datetime
    ) -> dict[StreamKey, str]:
        """Makes the streams of `records` known and their segments, both as far as the limits allow. Returns
        the streams that would be too many, each with why its records cannot be stored.

        The caller holds the ingest lock, so that two writers cannot pass a limit together.
        """
        wanted: dict[StreamKey, dict[str, str]] = {}
        for record in records:
            wanted.setdefault(record.stream_key, {})[record.segment] = record.draft
        drafts = {key: next(iter(wanted[key].values())) for key in wanted if key not in self.streams}
        refused = self._find_or_create(session, drafts, now) if drafts else {}
        for key, segments in wanted.items():
            if key in refused:
                continue
            stream = self.streams[key]
            fresh = [name for name in segments if name not in stream.segments and name != OTHER_SEGMENT]
            _add_segments(session, stream, fresh, now)
        return refused

    def _find_or_create(
        self, session: Session, drafts: Mapping[StreamKey, str], now: datetime
    ) -> dict[StreamKey, str]:
        """`drafts`: of streams that are not remembered. Returns what `register` does."""
        self.streams |= _find(session, drafts)
        new = [key for key in drafts if key not in self.streams]
        if not new:
            return {}
        room = len(new)
        if self.max_streams is not None:
            present = session.scalar(select(func.count()).select_from(Stream)) or 0
            room = max(self.max_streams - present, 0)
        self.streams |= _create(session, {key: drafts[key] for key in new[:room]}, now)
        return {key: _too_many(key, self.max_streams) for key in new[room:]}


_KEY = (Stream.server, Stream.target, Stream.draft_version, Stream.method)


def _find(session: Session, keys: Collection[StreamKey]) -> dict[StreamKey, KnownStream]:
    """Those of `keys` that are stored."""
    columns = zip(*((key.server, key.target, key.draft_version, key.method) for key in keys), strict=True)
    arrays = (literal(list(column), ARRAY(Text)) for column in columns)
    asked = func.unnest(*arrays).table_valued(*(column.key for column in _KEY)).render_derived()
    rows = session.execute(select(Stream.id, *_KEY).where(tuple_(*_KEY).in_(select(asked)))).all()
    found = {stream_id: KnownStream(stream_id) for stream_id, *_ in rows}
    segments = select(Segment.stream_id, Segment.segment).where(Segment.stream_id.in_(found))
    for stream_id, segment in session.execute(segments):
        found[stream_id].segments.add(segment)
    return {StreamKey(*key): found[stream_id] for stream_id, *key in rows}


def _create(session: Session, drafts: Mapping[StreamKey, str], now: datetime) -> dict[StreamKey, KnownStream]:
    if not drafts:
        return {}
    rows = [
        {
            "server": key.server,
            "target": key.target,
            "draft_version": key.draft_version,
            "method": key.method,
            "draft": draft,
            "first_seen_at": now,
            "last_seen_at": now,
        }
        for key, draft in drafts.items()
    ]
    stored = session.execute(insert(Stream).returning(Stream.id, *_KEY), rows)
    return {StreamKey(*key): KnownStream(stream_id) for stream_id, *key in stored}


def _too_many(key: StreamKey, most: int | None) -> str:
    return (
        f"server {key.server!r}, target {key.target!r}, draft_version {key.draft_version!r}, method "
        f"{key.method!r} would be one stream more than the {most} of ingest.max_streams"
    )


def _add_segments(session: Session, stream: KnownStream, names: list[str], now: datetime) -> None:
    if not names or len(stream.segments) >= MAX_SEGMENTS_PER_STREAM:
        return
    # Another process may have added some since they were read.
    stream.segments.update(session.scalars(select(Segment.segment).where(Segment.stream_id == stream.id)))
    room = MAX_SEGMENTS_PER_STREAM - len(stream.segments)
    added = [name for name in names if name not in stream.segments][: max(room, 0)]
    if added:
        session.execute(
            insert(Segment),
            [{"stream_id": stream.id, "segment": name, "first_seen_at": now} for name in added],
        )
        stream.segments.update(added)


def begin_anew(session: Session, stream_id: int, at: datetime, *, because: RelearningReason) -> None:
    """Notes that the stream's detector began anew."""
    chosen = update(Stream).where(Stream.id == stream_id)
    session.execute(chosen.values(begun_anew_at=at, begun_anew_because=because))


def forget_beginning(session: Session, stream_id: int) -> None:
    """With its first baseline a stream is like any other again."""
    chosen = update(Stream).where(Stream.id == stream_id, Stream.begun_anew_at.is_not(None))
    session.execute(chosen.values(begun_anew_at=None, begun_anew_because=None))


@dataclass(frozen=True, slots=True)
class StreamRow:
    """The columns of Stream, as they were read. An object of the session's costs ten times as much, which
    counts where all of them are read."""

    id: int
    server: str
    target: str
    draft: str
    draft_version: str
    method: str
    first_seen_at: datetime
    last_seen_at: datetime
    traffic_arrived_at: datetime | None
    traffic_ended_at: datetime | None
    begun_anew_at: datetime | None
    begun_anew_because: RelearningReason | None
    records_in_other: int


_ROW: Final = tuple(getattr(Stream, field.name) for field in fields(StreamRow))


def all_streams(session: Session) -> list[StreamRow]:
    return [StreamRow(*row) for row in session.execute(select(*_ROW).order_by(Stream.id))]


def is_to_be_seen_again(
    at: InstrumentedAttribute[datetime] | InstrumentedAttribute[datetime | None],
    every: timedelta,
    now: datetime,
) -> ColumnElement[bool]:
    """Of a stream that was last seen then, or never: `every` is over, and traffic has arrived meanwhile; or a
    clock that was ahead has told the time."""
    return or_(at.is_(None), (at < now - every) & (Stream.traffic_arrived_at > at), at > now + every)


def are_ahead(known: Iterable[StreamRow], now: datetime) -> bool:
    """Whether one was heard later than now: by a clock that was ahead, or has been set back since."""
    times = ((row.last_seen_at, row.traffic_arrived_at, row.traffic_ended_at) for row in known)
    return any(at > now + FUTURE_TOLERANCE for row in times for at in row if at is not None)


def move_back(session: Session, now: datetime) -> bool:
    """Those that were heard later than now, also by the clock of the database: this one may be behind. The
    newest of them now, each other one as long before it as it was. Else a server would seem to send until
    then, and its draft to be newer than the one after it. Returns whether there were any."""
    latest = max(now, session.execute(select(func.clock_timestamp())).scalar_one()) + FUTURE_TOLERANCE
    times = (Stream.last_seen_at, Stream.traffic_arrived_at, Stream.traffic_ended_at)
    # Locked in the order in which ingest changes them: two that wait for each other would be a deadlock.
    ahead = select(Stream.id).where(or_(*(column > latest for column in times))).order_by(Stream.id)
    if not session.scalars(ahead.with_for_update(key_share=True)).all():
        return False
    for column in times:
        newest = session.scalar(select(func.max(column)))
        if newest is not None and newest > latest:
            back = newest - latest + FUTURE_TOLERANCE
            session.execute(update(Stream).where(column > latest).values({column: column - back}))
    return True


def of_server(session: Session, server: str, target: str | None = None) -> list[StreamRow]:
    """Streams of a server, by default of all of its targets: earlier and later drafts."""
    query = select(*_ROW).where(Stream.server == server)
    if target is not None:
        query = query.where(Stream.target == target)
    return [StreamRow(*row) for row in session.execute(query.order_by(Stream.id))]


def drafted_last(session: Session, server: str) -> Drafted | None:
    """None: it never drafted."""
    query = select(Stream.draft, Stream.method).where(Stream.server == server, Stream.method != "none")
    row = session.execute(query.order_by(Stream.last_seen_at.desc(), Stream.id.desc()).limit(1)).first()
    return None if row is None else Drafted(*row)


def has_older_segments(session: Session, stream_id: int, segment: str) -> bool:
    """Were segments of the stream stored before this one was?"""
    own = select(Segment.first_seen_at).where(Segment.stream_id == stream_id, Segment.segment == segment)
    older = select(Segment.segment).where(
        Segment.stream_id == stream_id, Segment.first_seen_at < own.scalar_subquery()
    )
    return session.scalar(older.limit(1)) is not None


def get_stream(session: Session, stream_id: int) -> Stream | None:
    return session.get(Stream, stream_id)


def with_segment_like(session: Session, text: str) -> set[int]:
    """Ids of the streams that have a segment with `text` in its name, in capitals or not."""
    query = select(Segment.stream_id).where(Segment.segment.icontains(text, autoescape=True))
    return set(session.scalars(query))
