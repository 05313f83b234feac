"""Streams and their segments: at most 64 named segments per stream, the rest are stored as 'other'."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from datetime import datetime

from sqlalchemy import select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from driftguard.records import MAX_SEGMENTS_PER_STREAM, OTHER_SEGMENT, AcceptanceRecord, StreamKey
from driftguard.store.tables import Segment, Stream


@dataclass(slots=True)
class KnownStream:
    """A stream's id and the segments it has; more segments than the limit go to 'other'."""

    id: int
    segments: set[str] = field(default_factory=set)

    def place(self, segment: str) -> str:
        return segment if segment in self.segments else OTHER_SEGMENT


@dataclass(slots=True)
class StreamRegistry:
    """The writer's memory of streams and segments.

    Rows only grow, so what is remembered stays true; except what a transaction that failed had added:
    after a failure the registry is thrown away and fills again from the database.
    """

    streams: dict[StreamKey, KnownStream] = field(default_factory=dict)

    def register(self, session: Session, records: Iterable[AcceptanceRecord], now: datetime) -> None:
        """Makes every stream of `records` known, and its segments as far as the limit allows.

        The caller holds the ingest lock, so that two writers cannot pass the limit together.
        """
        wanted: dict[StreamKey, dict[str, str]] = {}
        for record in records:
            wanted.setdefault(record.stream_key, {})[record.segment] = record.draft
        for key, segments in wanted.items():
            stream = self.streams.get(key)
            if stream is None:
                draft = next(iter(segments.values()))
                stream = self.streams[key] = _find_or_create(session, key, draft, now)
            fresh = [name for name in segments if name not in stream.segments and name != OTHER_SEGMENT]
            _add_segments(session, stream, fresh, now)


def _find_or_create(session: Session, key: StreamKey, draft: str, now: datetime) -> KnownStream:
    values = {"server": key.server, "target": key.target, "draft_version": key.draft_version}
    session.execute(
        insert(Stream)
        .values(**values, method=key.method, draft=draft, first_seen_at=now, last_seen_at=now)
        .on_conflict_do_nothing(constraint="uq_streams_key")
    )
    stream_id = session.scalars(select(Stream.id).filter_by(**values, method=key.method)).one()
    segments = session.scalars(select(Segment.segment).where(Segment.stream_id == stream_id))
    return KnownStream(stream_id, set(segments))


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


def begin_anew(session: Session, stream_id: int, at: datetime, *, because: str) -> None:
    """Notes that the stream's detector began anew."""
    chosen = update(Stream).where(Stream.id == stream_id)
    session.execute(chosen.values(begun_anew_at=at, begun_anew_because=because))


def forget_beginning(session: Session, stream_id: int) -> None:
    chosen = update(Stream).where(Stream.id == stream_id, Stream.begun_anew_at.is_not(None))
    session.execute(chosen.values(begun_anew_at=None, begun_anew_because=None))


def all_streams(session: Session) -> list[Stream]:
    return list(session.scalars(select(Stream).order_by(Stream.id)))


def streams_of(session: Session, stream_ids: Collection[int]) -> list[Stream]:
    return list(session.scalars(select(Stream).where(Stream.id.in_(stream_ids)).order_by(Stream.id)))


def get_stream(session: Session, stream_id: int) -> Stream | None:
    return session.get(Stream, stream_id)
