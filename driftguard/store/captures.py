"""Captured token ids of sampled requests: off by default, bounded per segment, kept for a few days."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, NamedTuple
from uuid import UUID

import msgspec
from sqlalchemy import and_, any_, delete, false, func, literal, or_, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from driftguard.records import DEFAULT_SEGMENT, MAX_SEGMENTS_PER_STREAM, OTHER_SEGMENT, Instant, Text
from driftguard.store.advisory_locks import taking_lock
from driftguard.store.database import REQUEST
from driftguard.store.tables import Capture

MAX_TOKENS = 2**17  # per list: longer contexts than drafts are trained on
TokenIds = Annotated[list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]], msgspec.Meta(max_length=MAX_TOKENS)]
_CAPTURE_LOCK = taking_lock(0x6472696674_03, REQUEST)  # "drift" + 3: one writer, so that the bounds hold


class CapturedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One captured request as it travels: a line of POST and GET /api/v1/captures."""

    record_id: UUID
    server: Text
    target: Text
    draft_version: Text
    captured_at: Instant
    prompt_token_ids: TokenIds
    output_token_ids: TokenIds
    segment: Text = DEFAULT_SEGMENT


@dataclass(frozen=True, slots=True)
class CaptureFilter:
    """Which captures to read; None leaves a field open. `segments` empty means all."""

    server: str | None = None
    target: str | None = None
    segments: Sequence[str] = ()
    since: datetime | None = None
    until: datetime | None = None


def insert_captures(session: Session, captured: Sequence[CapturedRequest], *, max_per_segment: int) -> int:
    """Stores those that are new and removes the oldest beyond `max_per_segment`; returns how many were new.

    A (server, target) has at most 64 named segments here too; captures of others are kept as 'other'.
    """
    if not captured:
        return 0
    session.execute(_CAPTURE_LOCK)
    segments = {key: _segments(session, *key) for key in {(item.server, item.target) for item in captured}}
    rows = [_row(item, segments[item.server, item.target]) for item in captured]
    new = session.scalars(
        insert(Capture).on_conflict_do_nothing(index_elements=["record_id"]).returning(Capture.id), rows
    ).all()
    for key in {(row["server"], row["target"], row["segment"]) for row in rows}:
        _trim(session, *key, max_per_segment)
    return len(new)


def read_captures(
    session: Session, wanted: CaptureFilter, *, after_id: int = 0, limit: int = 500
) -> list[Capture]:
    """The next captures after `after_id`, in the order of arrival; fewer than `limit` means the end."""
    query = select(Capture).where(Capture.id > after_id).order_by(Capture.id).limit(limit)
    if wanted.server is not None:
        query = query.where(Capture.server == wanted.server)
    if wanted.target is not None:
        query = query.where(Capture.target == wanted.target)
    if wanted.segments:
        query = query.where(Capture.segment.in_(wanted.segments))
    if wanted.since is not None:
        query = query.where(Capture.captured_at >= wanted.since)
    if wanted.until is not None:
        query = query.where(Capture.captured_at < wanted.until)
    return list(session.scalars(query))


def to_wire(capture: Capture) -> CapturedRequest:
    return CapturedRequest(**{name: getattr(capture, name) for name in CapturedRequest.__struct_fields__})


# One index probe per distinct segment; SELECT DISTINCT would read every row of the server.
_SEGMENTS = text(
    """
    WITH RECURSIVE found AS (
      SELECT min(segment) AS segment FROM captures WHERE server = :server AND target = :target
      UNION ALL
      SELECT (SELECT min(c.segment) FROM captures c
              WHERE c.server = :server AND c.target = :target AND c.segment > found.segment)
      FROM found WHERE found.segment IS NOT NULL
    )
    SELECT segment FROM found WHERE segment IS NOT NULL
    """
)


def _segments(session: Session, server: str, target: str) -> set[str]:
    return set(session.scalars(_SEGMENTS, {"server": server, "target": target})) - {OTHER_SEGMENT}


def _row(item: CapturedRequest, known: set[str]) -> dict[str, object]:
    segment = item.segment
    if segment not in known and segment != OTHER_SEGMENT:
        if len(known) < MAX_SEGMENTS_PER_STREAM:
            known.add(segment)
        else:
            segment = OTHER_SEGMENT
    row: dict[str, object] = {name: getattr(item, name) for name in CapturedRequest.__struct_fields__}
    row["segment"] = segment
    return row


def _trim(session: Session, server: object, target: object, segment: object, keep: int) -> None:
    beyond = (
        select(Capture.id)
        .where(Capture.server == server, Capture.target == target, Capture.segment == segment)
        .order_by(Capture.captured_at.desc(), Capture.id.desc())
        .offset(keep)
    )
    session.execute(
        delete(Capture).where(Capture.id.in_(beyond)), execution_options={"synchronize_session": False}
    )


class CaptureOutline(NamedTuple):
    """One captured request without its token ids."""

    record_id: UUID
    segment: str
    captured_at: datetime
    tokens: int  # of prompt and output
    output_tokens: int


class CapturedTokens(NamedTuple):
    """The token ids of one captured request."""

    record_id: UUID
    prompt_token_ids: list[int]
    output_token_ids: list[int]


def count_since(session: Session, server: str, target: str, since: Mapping[str, datetime]) -> int:
    """Captured requests of these segments, each since then, by the index alone: token ids are megabytes."""
    of_each = [
        and_(Capture.segment == segment, Capture.captured_at >= begun) for segment, begun in since.items()
    ]
    query = select(func.count()).where(
        Capture.server == server, Capture.target == target, or_(false(), *of_each)
    )
    return session.scalar(query) or 0


def outline(session: Session, server: str, target: str) -> list[CaptureOutline]:
    """All captured requests of this server and target that a draft can learn from: with prompt and output."""
    prompt, output = (func.cardinality(ids) for ids in (Capture.prompt_token_ids, Capture.output_token_ids))
    query = select(Capture.record_id, Capture.segment, Capture.captured_at, prompt + output, output).where(
        Capture.server == server, Capture.target == target, prompt > 0, output > 0
    )
    return [CaptureOutline._make(row) for row in session.execute(query)]


def beyond_vocabulary(session: Session, server: str, target: str, vocabulary: int) -> set[UUID]:
    """The record ids of those with a token id that a target of `vocabulary` tokens lacks. Reads all token
    ids."""
    query = select(Capture.record_id).where(
        Capture.server == server,
        Capture.target == target,
        or_(
            literal(vocabulary) <= any_(Capture.prompt_token_ids),
            literal(vocabulary) <= any_(Capture.output_token_ids),
        ),
    )
    return set(session.scalars(query))


def token_ids(session: Session, record_ids: Sequence[UUID]) -> list[CapturedTokens]:
    """Of those that are still kept, in the order of arrival."""
    query = select(Capture.record_id, Capture.prompt_token_ids, Capture.output_token_ids)
    query = query.where(Capture.record_id.in_(record_ids)).order_by(Capture.id)
    return [CapturedTokens._make(row) for row in session.execute(query)]
