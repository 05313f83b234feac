"""What the detector knows, and the one position in the records up to which it has read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from sqlalchemy import ARRAY, BigInteger, any_, bindparam, delete, literal, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from driftguard.detection.state.parts import StoredState
from driftguard.store import held_streams
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
    is_first: bool  # nothing of the stream may be stored yet; the summary is not None then


def lock_fold(session: Session) -> None:
    """One fold at a time over all processes; held until the transaction ends."""
    session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})


class Progress(NamedTuple):
    """How far the fold is."""

    seq: int  # of the last folded record; 0 before the first
    folds: int  # how many there were
    folded_by: UUID | None = None  # the process that is to go on; None: any


def progress(session: Session) -> Progress:
    row = session.execute(
        select(FoldPosition.seq, FoldPosition.folds, FoldPosition.folded_by).where(
            FoldPosition.reader == READER
        )
    ).one_or_none()
    return Progress(*row) if row else Progress(0, 0)


def position(session: Session) -> int:
    """seq of the last folded record; 0 before the first."""
    return progress(session).seq


def set_progress(session: Session, now: Progress) -> None:
    values = now._asdict()
    statement = insert(FoldPosition).values(reader=READER, **values)
    session.execute(statement.on_conflict_do_update(index_elements=["reader"], set_=values))


def hand_over(session: Session, process_id: UUID) -> None:
    """Any process may go on at once, where that one folded last."""
    own = update(FoldPosition).where(FoldPosition.reader == READER, FoldPosition.folded_by == process_id)
    session.execute(own.values(folded_by=None))


def written_since(session: Session, folds: int) -> list[int]:
    """Streams whose state was written by a later fold than that."""
    return list(session.scalars(select(DetectorState.stream_id).where(DetectorState.fold > folds)))


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


def store(session: Session, changes: Sequence[Change], fold: int, updated_at: datetime) -> None:
    """`fold`: the number of the one that made them. Raises StaleDataError where a state that was stored
    before is gone."""
    heads = [_head(change, fold, updated_at) for change in changes]
    first = [head for head, change in zip(heads, changes, strict=True) if change.is_first]
    if first:
        statement = insert(DetectorState)
        columns = {name: statement.excluded[name] for name in first[0] if name != "stream_id"}
        session.execute(statement.on_conflict_do_update(index_elements=["stream_id"], set_=columns), first)
    later = [head for head, change in zip(heads, changes, strict=True) if not change.is_first]
    described = [head for head in later if head["summary"] is not None]
    others = [
        {name: value for name, value in head.items() if name != "summary"}
        for head in later
        if head["summary"] is None
    ]
    for rows in (described, others):
        if rows:
            session.execute(update(DetectorState), rows)
    _store_pieces(session, changes)


def _head(change: Change, fold: int, updated_at: datetime) -> dict[str, Any]:
    return {
        "stream_id": change.stream_id,
        "state": change.state.head,
        "history_rows": change.state.history_rows,
        "summary": change.summary,
        "updated_at": updated_at,
        "fold": fold,
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


def summaries(session: Session, stream_ids: Sequence[int]) -> dict[int, dict[str, Any]]:
    """stream id -> what the status shows, of those that were folded."""
    query = select(DetectorState.stream_id, DetectorState.summary)
    chosen = query.where(DetectorState.stream_id == any_(literal(stream_ids, ARRAY(BigInteger))))
    return {row.stream_id: row.summary for row in session.execute(chosen)}


def verdicts(session: Session) -> dict[int, str]:
    """stream id -> the detector's own verdict, of all that were folded."""
    query = select(DetectorState.stream_id, DetectorState.summary["verdict"].as_string().label("verdict"))
    return {row.stream_id: row.verdict for row in session.execute(query)}


class Lag(NamedTuple):
    """Stored records that are not folded."""

    position: int  # seq of the last record that was read
    unread: int
    held: int  # read, but their streams raised

    @property
    def records(self) -> int:
        return self.unread + self.held


def lag(session: Session) -> Lag:
    newest = session.scalar(text("SELECT max(seq) FROM records")) or 0
    at = position(session)
    return Lag(at, max(0, newest - at), held_streams.records_behind(session))


def unfolded(session: Session) -> int:
    return lag(session).records
