"""What the detector knows, and the one position in the records up to which it has read."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from driftguard.store.tables import DetectorState, FoldPosition

READER = "detector"
_LOCK = 4_706_137_201  # any number that no other advisory lock of this database uses


def lock_fold(session: Session) -> None:
    """One fold at a time over all processes; held until the transaction ends."""
    session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})


def position(session: Session) -> int:
    """seq of the last folded record; 0 before the first."""
    return session.scalar(select(FoldPosition.seq).where(FoldPosition.reader == READER)) or 0


def set_position(session: Session, seq: int) -> None:
    statement = insert(FoldPosition).values(reader=READER, seq=seq)
    session.execute(statement.on_conflict_do_update(index_elements=["reader"], set_={"seq": seq}))


def load(session: Session, stream_ids: Collection[int]) -> dict[int, bytes]:
    """Serialised states of those streams that have one."""
    query = select(DetectorState.stream_id, DetectorState.state).where(
        DetectorState.stream_id.in_(stream_ids)
    )
    return {row.stream_id: row.state for row in session.execute(query)}


def store(session: Session, states: dict[int, tuple[bytes, dict[str, Any]]], updated_at: datetime) -> None:
    """`states`: stream id -> (serialised state, what the status shows of it)."""
    if not states:
        return
    statement = insert(DetectorState).values(
        [
            {"stream_id": stream_id, "state": state, "summary": summary, "updated_at": updated_at}
            for stream_id, (state, summary) in sorted(states.items())
        ]
    )
    excluded = statement.excluded
    session.execute(
        statement.on_conflict_do_update(
            index_elements=["stream_id"],
            set_={"state": excluded.state, "summary": excluded.summary, "updated_at": excluded.updated_at},
        )
    )


def summaries(session: Session) -> dict[int, dict[str, Any]]:
    """stream id -> what the status shows."""
    query = select(DetectorState.stream_id, DetectorState.summary)
    return {row.stream_id: row.summary for row in session.execute(query)}


def unfolded(session: Session) -> int:
    """Stored records behind the position: the fold's lag."""
    newest = session.scalar(text("SELECT max(seq) FROM records")) or 0
    return max(0, newest - position(session))
