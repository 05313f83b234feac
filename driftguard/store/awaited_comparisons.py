"""Streams that are to be compared with the target before theirs: noted by the fold, compared later."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from sqlalchemy import delete, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from driftguard.store.tables import AwaitedComparison


def note(session: Session, stream_id: int, ready_seq: int, reference_since: datetime) -> None:
    """By the newest baseline of the stream: one noted before is replaced."""
    values = {"ready_seq": ready_seq, "reference_since": reference_since}
    statement = insert(AwaitedComparison).values(stream_id=stream_id, **values)
    session.execute(statement.on_conflict_do_update(index_elements=["stream_id"], set_=values))


def noted(session: Session) -> Sequence[AwaitedComparison]:
    """In order of streams."""
    return session.scalars(select(AwaitedComparison).order_by(AwaitedComparison.stream_id)).all()


def forget(session: Session, one: AwaitedComparison) -> None:
    """Unless a newer baseline has been noted meanwhile."""
    session.execute(
        delete(AwaitedComparison).where(
            AwaitedComparison.stream_id == one.stream_id, AwaitedComparison.ready_seq == one.ready_seq
        )
    )
