"""Streams that raised when they were folded: the fold goes on without them, and they are tried again."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from driftguard.store.tables import HeldStream


def all_held(session: Session) -> list[HeldStream]:
    """By stream."""
    return list(session.scalars(select(HeldStream).order_by(HeldStream.stream_id)))


def set_aside(session: Session) -> dict[int, HeldStream]:
    """Stream id -> those that failed too often to be tried again by themselves."""
    rows = session.scalars(select(HeldStream).where(HeldStream.set_aside_at.is_not(None)))
    return {row.stream_id: row for row in rows}


def find(session: Session, stream_id: int) -> HeldStream | None:
    """None: it is folded like every other."""
    return session.get(HeldStream, stream_id)


def records_behind(session: Session) -> int:
    """Of all of them: read by the fold, and waiting until their stream can be folded again."""
    return int(session.scalar(select(func.sum(HeldStream.records_behind))) or 0)


def hold(session: Session, stream_id: int, values: Mapping[str, Any]) -> None:
    """`values`: every other column."""
    session.execute(insert(HeldStream).values(stream_id=stream_id, **values))


def change(session: Session, stream_id: int, values: Mapping[str, Any]) -> None:
    session.execute(update(HeldStream).where(HeldStream.stream_id == stream_id).values(**values))


def add_behind(session: Session, records: Mapping[int, int]) -> None:
    """Stream id -> records that the fold read past."""
    for stream_id, count in records.items():
        behind = HeldStream.records_behind + count
        session.execute(
            update(HeldStream).where(HeldStream.stream_id == stream_id).values(records_behind=behind)
        )


def release(session: Session, stream_id: int) -> None:
    session.execute(delete(HeldStream).where(HeldStream.stream_id == stream_id))


def try_at(session: Session, stream_id: int, at: datetime) -> HeldStream | None:
    """Has it tried again then; None: it is not held."""
    query = update(HeldStream).where(HeldStream.stream_id == stream_id)
    return session.scalars(query.values(next_try_at=at).returning(HeldStream)).one_or_none()
