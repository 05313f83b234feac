"""What the fold reads and writes: records behind its position, the detector's state of each stream, that one
position, the streams that it goes without, and the drafts that it watches.

A stream that it goes without is held: it raised when it was folded, and is tried again from a position of its
own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple
from uuid import UUID

from sqlalchemy import ARRAY, BigInteger, any_, bindparam, delete, func, literal, select, text, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from driftguard.detection.state.codec import StoredState
from driftguard.store.advisory_locks import Transaction, taking_lock
from driftguard.store.by_arrival import of_stream, oldest_first
from driftguard.store.database import DELETES_NOTHING, FOLD, is_too_slow
from driftguard.store.tables import (
    DetectorHistory,
    DetectorState,
    FoldPosition,
    HeldStream,
    Record,
    RetrainRun,
    Stream,
)

READER = "detector"
_LOCK = taking_lock(4_706_137_201, FOLD)  # any number that no other advisory lock of this database uses


PROMPT_SHARE: Final = 0.1  # of the time that a statement has: what another stream may take in comparison


class StoredRecord(NamedTuple):
    """What the detector reads of one record."""

    seq: int
    stream_id: int
    segment: str
    session: str | None
    kind: str
    fidelity: str
    started_at: datetime
    ended_at: datetime
    steps: int
    drafted: int
    accepted: int
    emitted: int
    num_speculative_tokens: int | None
    acceptance_rule: str
    verification: str
    temperature: float | None
    output_tokens: int | None
    prompt_tokens: int | None
    cached_tokens: int | None  # of the prompt
    time_per_output_token_seconds: float | None
    concurrency: int | None
    started_requests: int | None  # in a window
    drafted_per_position: list[int] | None  # None where the record does not tell
    accepted_per_position: list[int] | None


_STORED = tuple(getattr(Record, name) for name in StoredRecord._fields)


def read_after(session: Session, seq: int, *, limit: int) -> list[StoredRecord]:
    """The next records after `seq`, in order; fewer than `limit` means that there are no more yet."""
    rows = session.execute(select(*_STORED).where(Record.seq > seq).order_by(Record.seq).limit(limit))
    return [StoredRecord(*row) for row in rows]


def read_of_stream(
    session: Session, stream_id: int, *, after: int, up_to: int, limit: int
) -> list[StoredRecord]:
    """Those of one stream with after < seq <= up_to, in order."""
    own = select(*_STORED).where(of_stream(stream_id), Record.seq > after, Record.seq <= up_to)
    return [StoredRecord(*row) for row in session.execute(own.order_by(*oldest_first).limit(limit))]


def streams_of(session: Session, stream_ids: Collection[int]) -> list[Stream]:
    return list(session.scalars(select(Stream).where(Stream.id.in_(stream_ids)).order_by(Stream.id)))


@dataclass(frozen=True, slots=True)
class Change:
    """What a fold made of one stream's detector."""

    stream_id: int
    state: StoredState  # of whose pieces only those that are new
    first_stored: int  # number of the oldest piece stored so far; of the first one added where there is none
    first_needed: int  # of the oldest one that belongs to the history
    summary: dict[str, Any] | None  # what the status shows; None: what it shows now may stay for a while
    is_first: bool  # nothing of the stream may be stored yet; the summary is not None then


def expect_writable(session: Session) -> None:
    """Raises what every write raises where the database may only be read."""
    session.execute(DELETES_NOTHING)


def lock_fold(session: Session, before: Transaction = Transaction()) -> Transaction:
    """One fold at a time over all processes; held until the transaction ends, which is returned. `before`:
    the one of the caller's last fold. Should it still hold the lock, its connection failed, which behind a
    pooler the server may not have heard of: then it is ended."""
    taken = session.execute(_LOCK, {"abandoned_pid": before.pid, "abandoned_since": before.since}).one()
    return Transaction(*taken[:3])


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


def variance_inflation(session: Session, stream_id: int) -> float:
    """How many times as much as independent ones the stream's observations vary in the long run: the largest
    of any segment and settings there ever were."""
    return float(summaries(session, [stream_id]).get(stream_id, {}).get("variance_inflation", 1.0))


def variance_inflations(session: Session, stream_id: int, segments: Collection[str]) -> dict[str, float]:
    """The same of each of these segments, with the settings of its newest requests, or with any while the
    baseline with these is young; the stream's, where it has none with these."""
    summary = summaries(session, [stream_id]).get(stream_id, {})
    own = {each["segment"]: each.get("known_inflation") for each in summary.get("segments", ())}
    of_stream = summary.get("variance_inflation", 1.0)
    return {segment: float(own.get(segment) or of_stream) for segment in segments}


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
    return Lag(at, max(0, newest - at), records_behind(session))


def unfolded(session: Session) -> int:
    return lag(session).records


def is_another_in_time(session: Session, stream_id: int) -> bool:
    """Whether the state of another stream, any one, can be written promptly; it is left as it is."""
    limit_ms = round(PROMPT_SHARE * FOLD.statement_seconds * 1_000)
    try:
        with session.begin_nested() as comparison:
            session.execute(
                text("SELECT set_config('statement_timeout', :limit, true)"), {"limit": str(limit_ms)}
            )
            written = session.execute(
                text(
                    "UPDATE detector_states SET updated_at = updated_at WHERE stream_id = (SELECT stream_id "
                    "FROM detector_states WHERE stream_id <> :stream_id ORDER BY random() LIMIT 1) "
                    "RETURNING stream_id"
                ),
                {"stream_id": stream_id},
            ).all()
            comparison.rollback()
    except DBAPIError as error:
        if is_too_slow(error):
            return False
        raise
    return bool(written)


def all_held(session: Session) -> list[HeldStream]:
    """By stream."""
    return list(session.scalars(select(HeldStream).order_by(HeldStream.stream_id)))


def set_aside(session: Session) -> dict[int, HeldStream]:
    """Stream id -> those that failed too often to be tried again by themselves."""
    rows = session.scalars(select(HeldStream).where(HeldStream.set_aside_at.is_not(None)))
    return {row.stream_id: row for row in rows}


def find_held(session: Session, stream_id: int) -> HeldStream | None:
    """None: it is folded like every other."""
    return session.get(HeldStream, stream_id)


def records_behind(session: Session) -> int:
    """Of all of them: read by the fold, and waiting until their stream can be folded again."""
    return int(session.scalar(select(func.sum(HeldStream.records_behind))) or 0)


def hold_stream(session: Session, stream_id: int, values: Mapping[str, Any]) -> None:
    """`values`: every other column."""
    session.execute(insert(HeldStream).values(stream_id=stream_id, **values))


def change_held(session: Session, stream_id: int, values: Mapping[str, Any]) -> None:
    session.execute(update(HeldStream).where(HeldStream.stream_id == stream_id).values(**values))


def add_behind(session: Session, records: Mapping[int, int]) -> None:
    """Stream id -> records that the fold read past."""
    for stream_id, count in records.items():
        behind = HeldStream.records_behind + count
        session.execute(
            update(HeldStream).where(HeldStream.stream_id == stream_id).values(records_behind=behind)
        )


def release_held(session: Session, stream_id: int) -> None:
    session.execute(delete(HeldStream).where(HeldStream.stream_id == stream_id))


def try_at(session: Session, stream_id: int, at: datetime) -> HeldStream | None:
    """Has it tried again then; None: it is not held."""
    query = update(HeldStream).where(HeldStream.stream_id == stream_id)
    return session.scalars(query.values(next_try_at=at).returning(HeldStream)).one_or_none()


def watched_versions(session: Session) -> set[tuple[str, str, str]]:
    """(server, target, draft version) of every promoted draft that is being watched."""
    query = select(RetrainRun.server, RetrainRun.target, RetrainRun.candidate_version)
    rows = session.execute(
        query.where(RetrainRun.state == "watching", RetrainRun.candidate_version.is_not(None))
    )
    return {(server, target, version) for server, target, version in rows if version is not None}
