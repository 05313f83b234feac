"""What the detector knows, and the one position in the records up to which it has read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import bindparam, delete, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from driftguard.detection.stored import StoredState
from driftguard.store.tables import DetectorHistory, DetectorState, FoldPosition

READER = "detector"
_LOCK = 4_706_137_201  # any number that no other advisory lock of this database uses


@dataclass(frozen=True, slots=True)
class Change:
    """What a fold made of one stream's detector."""

    stream_id: int
    state: StoredState  # of whose pieces only those that are new
    first_stored: int  # number of the oldest piece stored so far; of the first one added where there is none
    first_needed: int  # of the oldest one that belongs to the history
    summary: dict[str, Any] | None  # what the status shows; None: what it shows now may stay for a while


def lock_fold(session: Session) -> None:
    """One fold at a time over all processes; held until the transaction ends."""
    session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})


def position(session: Session) -> int:
    """seq of the last folded record; 0 before the first."""
    return session.scalar(select(FoldPosition.seq).where(FoldPosition.reader == READER)) or 0


def set_position(session: Session, seq: int) -> None:
    statement = insert(FoldPosition).values(reader=READER, seq=seq)
    session.execute(statement.on_conflict_do_update(index_elements=["reader"], set_={"seq": seq}))


def load(session: Session, stream_ids: Collection[int]) -> dict[int, StoredState]:
    """Of those streams that have one."""
    pieces: dict[int, dict[int, bytes]] = defaultdict(dict)
    of_streams = DetectorHistory.stream_id.in_(stream_ids)
    query = select(DetectorHistory.stream_id, DetectorHistory.number, DetectorHistory.piece)
    for row in session.execute(query.where(of_streams)):
        pieces[row.stream_id][row.number] = row.piece
    heads = select(DetectorState.stream_id, DetectorState.state, DetectorState.history_rows)
    return {
        row.stream_id: StoredState(row.state, row.history_rows, pieces[row.stream_id])
        for row in session.execute(heads.where(DetectorState.stream_id.in_(stream_ids)))
    }


def store(session: Session, changes: Sequence[Change], updated_at: datetime) -> None:
    """Raises StaleDataError where a state that was stored before is gone."""
    heads = [_head(change, updated_at) for change in changes]
    described = [head for head in heads if head["summary"] is not None]
    if described:
        statement = insert(DetectorState)
        columns = {name: statement.excluded[name] for name in described[0] if name != "stream_id"}
        session.execute(
            statement.on_conflict_do_update(index_elements=["stream_id"], set_=columns), described
        )
    others = [
        {name: value for name, value in head.items() if name != "summary"}
        for head in heads
        if head["summary"] is None
    ]
    if others:
        session.execute(update(DetectorState), others)
    _store_pieces(session, changes)


def _head(change: Change, updated_at: datetime) -> dict[str, Any]:
    return {
        "stream_id": change.stream_id,
        "state": change.state.head,
        "history_rows": change.state.history_rows,
        "summary": change.summary,
        "updated_at": updated_at,
    }


def _store_pieces(session: Session, changes: Sequence[Change]) -> None:
    """Adds those that are new, and removes those that have fallen out of their history."""
    outdated = [
        {"of_stream": change.stream_id, "first_needed": change.first_needed}
        for change in changes
        if change.first_stored < change.first_needed
    ]
    if outdated:
        fallen_out = delete(DetectorHistory).where(
            DetectorHistory.stream_id == bindparam("of_stream"),
            DetectorHistory.number < bindparam("first_needed"),
        )
        session.connection().execute(fallen_out, outdated)
    added = [
        {"stream_id": change.stream_id, "number": number, "piece": piece}
        for change in changes
        for number, piece in change.state.pieces.items()
    ]
    if added:
        session.execute(insert(DetectorHistory), added)


def store_summaries(session: Session, summaries: Mapping[int, dict[str, Any]]) -> None:
    """Stream id -> what the status shows, of states that stay as they are."""
    if summaries:
        rows = [{"of_stream": stream_id, "shown": summary} for stream_id, summary in summaries.items()]
        statement = update(DetectorState).where(DetectorState.stream_id == bindparam("of_stream"))
        session.connection().execute(statement.values(summary=bindparam("shown")), rows)


def forget_history(session: Session, stream_id: int) -> None:
    session.execute(delete(DetectorHistory).where(DetectorHistory.stream_id == stream_id))


def summaries(session: Session) -> dict[int, dict[str, Any]]:
    """stream id -> what the status shows."""
    query = select(DetectorState.stream_id, DetectorState.summary)
    return {row.stream_id: row.summary for row in session.execute(query)}


def unfolded(session: Session) -> int:
    """Stored records behind the position: the fold's lag."""
    newest = session.scalar(text("SELECT max(seq) FROM records")) or 0
    return max(0, newest - position(session))
