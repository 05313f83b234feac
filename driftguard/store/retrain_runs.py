"""Retraining runs, and the lock that lets only one run per (server, target) be under way.

States: collecting -> training -> evaluating -> promoting -> watching are running; promoted, rejected,
nothing_to_do, failed and rolled_back are endings. A watching run holds no lock: its watch is part of the
detector's fold. Where drafts are changed by a restart, rolling_out comes before watching, and rolling_back
before rolled_back: the restart was asked for, and records of that draft are awaited, without a lock. A
rollback by hand is rolling_back too while an engine with an admin API does it, under the lock.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from typing import Any, Final, Literal, NamedTuple
from uuid import UUID

from sqlalchemy import Connection, func, select, text, update
from sqlalchemy.dialects.postgresql import distinct_on
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from driftguard.errors import DatabaseUnavailable
from driftguard.records import Instant
from driftguard.records.documents.retraining_run import Rollout, RunNumbers, TrainingCurve, Watch
from driftguard.store.database import CHECK, Database
from driftguard.store.row_filter import EVERYTHING, RowFilter, newest_first
from driftguard.store.tables import RetrainRun

RunState = Literal[
    "collecting",
    "training",
    "evaluating",
    "promoting",
    "rolling_out",
    "watching",
    "rolling_back",
    "promoted",
    "rejected",
    "nothing_to_do",
    "failed",
    "rolled_back",
]
Failure = Literal["rejected", "failed"]
PREPARING_STATES = ("collecting", "training", "evaluating")  # what serves is not touched yet
LOCKED_STATES = (*PREPARING_STATES, "promoting")  # only while its process holds the lock
ROLLING_STATES = ("rolling_out", "rolling_back")
RUNNING_STATES = (*LOCKED_STATES, "rolling_out", "watching", "rolling_back")
ENDED_STATES = ("promoted", "rejected", "nothing_to_do", "failed", "rolled_back")


class Cursor(NamedTuple):
    """The last run of the page before: newest first, by (started_at, id)."""

    started_at: Instant
    id: UUID


def now(session: Session) -> datetime:
    """By the clock of the database, which a nightly job on another machine shares with the sidecar."""
    at: datetime = session.execute(select(func.clock_timestamp())).scalar_one()
    return at


def numbers_of(run: RetrainRun) -> RunNumbers:
    """What is known of it so far, which may be nothing."""
    return run.numbers or RunNumbers()


def rollout_of(run: RetrainRun) -> Rollout:
    """Of a run in one of ROLLING_STATES. Raises ValueError for one that was never rolled out."""
    if (rollout := numbers_of(run).rollout) is None:
        raise ValueError(f"run {run.id} is {run.state} and awaits no restart")
    return rollout


def watch_of(run: RetrainRun) -> Watch:
    """Of a run that was promoted. Raises ValueError for another."""
    if (watch := numbers_of(run).watch) is None:
        raise ValueError(f"run {run.id} is {run.state} and is not watched")
    return watch


class RunLock:
    """The lock of one running retraining; gone at the moment its process or its connection dies."""

    def __init__(self, database: Database, connection: Connection, key: str) -> None:
        self._database = database
        self._connection = connection
        self._key = key
        self._pid = connection.scalar(select(func.pg_backend_pid()))

    def check(self) -> None:
        """Raises DatabaseUnavailable when the lock was lost with its connection."""
        try:
            held = self._connection.scalar(_HELD, {"key": self._key})
        except DBAPIError as error:
            raise DatabaseUnavailable(f"the connection that held the lock is gone: {error.orig}") from error
        if not held:
            raise DatabaseUnavailable("the lock of this retraining is gone: the connection was replaced")

    def is_lost(self) -> bool:
        """Whether the database says so. It is asked on another connection: one that waits too long for an
        answer is given up, and would lose the lock by that."""
        try:
            with self._database.session(CHECK) as session:
                return not session.scalar(_HOLDS, {"key": self._key, "pid": self._pid})
        except DatabaseUnavailable:
            return False  # not known


_TRY_LOCK = text("SELECT pg_try_advisory_lock(hashtextextended(:key, 0))")
_UNLOCK = text("SELECT pg_advisory_unlock(hashtextextended(:key, 0))")
_HELD = text(
    """
    SELECT EXISTS (
        SELECT FROM pg_locks
        WHERE locktype = 'advisory' AND granted AND pid = pg_backend_pid()
          AND ((classid::bigint << 32) | objid::bigint) = hashtextextended(:key, 0)
    )
    """
)


@contextmanager
def try_lock(database: Database, server: str, target: str) -> Iterator[RunLock | None]:
    """None when another process or thread holds the lock of this (server, target).

    A session-level advisory lock on a connection of its own, so a connection pooler between this process
    and the database must pool sessions, not transactions.
    """
    key = f"driftguard retraining {server} / {target}"
    with database.connect() as pooled:
        connection = pooled.execution_options(isolation_level="AUTOCOMMIT")
        if not connection.scalar(_TRY_LOCK, {"key": key}):
            yield None
            return
        try:
            yield RunLock(database, connection, key)
        finally:
            _release(connection, key)


def _release(connection: Connection, key: str) -> None:
    if connection.invalidated:  # found broken by `check`
        return
    try:
        connection.execute(_UNLOCK, {"key": key})
    except DBAPIError:
        connection.invalidate()  # the server released the lock when the connection broke


def is_running(session: Session, server: str, target: str) -> bool:
    """Whether some process runs a retraining of this pair now; a killed one does not count."""
    key = f"driftguard retraining {server} / {target}"
    return bool(session.scalar(_ANYONE_HOLDS, {"key": key}))


_HELD_BY_ANYONE: Final = """
    SELECT FROM pg_locks
    WHERE locktype = 'advisory' AND granted
      AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
      AND ((classid::bigint << 32) | objid::bigint) = hashtextextended(:key, 0)
"""
_ANYONE_HOLDS = text(f"SELECT EXISTS ({_HELD_BY_ANYONE})")
_HOLDS = text(f"SELECT EXISTS ({_HELD_BY_ANYONE} AND pid = :pid)")


def begin(session: Session, run: RetrainRun) -> None:
    session.add(run)
    session.flush()


def advance(session: Session, run_id: UUID, state: RunState, **values: Any) -> None:
    """Moves a run to its next running state; `values` are columns that are known by then."""
    session.execute(
        update(RetrainRun).where(RetrainRun.id == run_id).values(state=state, progress=None, **values)
    )


def set_progress(
    session: Session, run_id: UUID, progress: dict[str, Any] | None, curve: TrainingCurve
) -> None:
    session.execute(update(RetrainRun).where(RetrainRun.id == run_id).values(progress=progress, curve=curve))


def curve_of(session: Session, run_id: UUID) -> TrainingCurve | None:
    """None: of a run that has not begun to train, that makes a corpus, or of an earlier version."""
    return session.scalar(select(RetrainRun.curve).where(RetrainRun.id == run_id))


def end(session: Session, run_id: UUID, state: RunState, reason: str, at: datetime, **values: Any) -> None:
    session.execute(
        update(RetrainRun)
        .where(RetrainRun.id == run_id)
        .values(state=state, reason=reason, ended_at=at, progress=None, **values)
    )


def add_to_reason(session: Session, run_id: UUID, told: str, *, instead_of: str | None = None) -> None:
    """What happened to the draft of a run that has ended. `instead_of`: how the parts of the reason begin
    that this one replaces."""
    reason: Any = RetrainRun.reason
    if instead_of is not None:
        reason = func.regexp_replace(reason, f"(^|; ){instead_of}[^;]*", "", "g")
    reason = func.concat_ws("; ", func.nullif(reason, ""), told)
    session.execute(update(RetrainRun).where(RetrainRun.id == run_id).values(reason=reason))


def change_numbers(session: Session, run_id: UUID, **changed: Any) -> None:
    """Fields of RunNumbers; the others stay. Locked, because a fold may advance its watch."""
    run = session.get_one(RetrainRun, run_id, with_for_update=True)
    run.numbers = replace(numbers_of(run), **changed)


def store_nothing_to_do(session: Session, run: RetrainRun) -> UUID:
    """Stores a run that found nothing to do. An incident that waits for traffic asks every minute: in a row
    of such runs there is one row, which tells the latest."""
    last = latest(session, run.server, run.target) if run.trigger == "incident" else None
    alike = last is not None and (last.incident_id, last.trigger) == (run.incident_id, run.trigger)
    if last is not None and last.state == "nothing_to_do" and alike:
        last.reason, last.ended_at = run.reason, run.ended_at
        session.flush()
        return last.id
    begin(session, run)
    return run.id


def find(session: Session, run_id: UUID, *, locked: bool = False) -> RetrainRun | None:
    """`locked`: for this unit of work, because a fold may advance or end its watch."""
    return session.get(RetrainRun, run_id, with_for_update=locked)


def latest(session: Session, server: str, target: str) -> RetrainRun | None:
    return session.scalar(
        select(RetrainRun)
        .where(RetrainRun.server == server, RetrainRun.target == target)
        .order_by(RetrainRun.started_at.desc(), RetrainRun.id.desc())
        .limit(1)
    )


def of_incident(session: Session, incident_id: UUID) -> list[RetrainRun]:
    """Newest first; as they are now, also where this session has read them before."""
    return list(
        session.scalars(
            select(RetrainRun)
            .where(RetrainRun.incident_id == incident_id)
            .order_by(RetrainRun.started_at.desc(), RetrainRun.id.desc()),
            execution_options={"populate_existing": True},
        )
    )


def unended(session: Session) -> list[RetrainRun]:
    """Every run that has not ended, of all servers; whether its process lives is another question."""
    return list(session.scalars(select(RetrainRun).where(RetrainRun.state.not_in(ENDED_STATES))))


def begun_since(session: Session, server: str, at: datetime) -> RetrainRun | None:
    """The newest run of this server that has begun since then; one with nothing to do has not."""
    return session.scalar(
        select(RetrainRun)
        .where(RetrainRun.server == server, RetrainRun.started_at >= at, RetrainRun.state != "nothing_to_do")
        .order_by(RetrainRun.started_at.desc())
        .limit(1)
    )


def in_states(session: Session, server: str, target: str, states: Sequence[str]) -> list[RetrainRun]:
    """Oldest first."""
    return list(
        session.scalars(
            select(RetrainRun)
            .where(RetrainRun.server == server, RetrainRun.target == target, RetrainRun.state.in_(states))
            .order_by(RetrainRun.started_at, RetrainRun.id)
        )
    )


def watching(session: Session, server: str, target: str, draft_version: str) -> RetrainRun | None:
    """The run whose promoted draft is being watched, locked for this unit of work."""
    return session.scalar(
        select(RetrainRun)
        .where(
            RetrainRun.server == server,
            RetrainRun.target == target,
            RetrainRun.candidate_version == draft_version,
            RetrainRun.state == "watching",
        )
        .with_for_update()
    )


def is_taken_back(run: RetrainRun) -> bool:
    """Whether its draft is worse than the one before, or is to be rolled back for another reason."""
    is_worse = run.state == "watching" and watch_of(run).verdict == "worse"
    return is_worse or run.state == "rolling_back"


def taken_back(session: Session, server: str, target: str, draft_version: str) -> RetrainRun | None:
    """The run whose promoted draft is to be rolled back, or is being."""
    runs = in_states(session, server, target, ("watching", "rolling_back"))
    made = (run for run in runs if run.candidate_version == draft_version)
    return next(filter(is_taken_back, made), None)


def ended_ids(session: Session, run_ids: Sequence[UUID]) -> set[UUID]:
    """Which of these runs are over, so that their files may go."""
    return set(
        session.scalars(
            select(RetrainRun.id).where(RetrainRun.id.in_(run_ids), RetrainRun.state.in_(ENDED_STATES))
        )
    )


def last_judged(session: Session) -> list[RetrainRun]:
    """The newest run of each (server, target) that the gate decided on. By id first, so that no documents are
    sorted."""
    newest = (
        select(RetrainRun.id)
        .where(RetrainRun.numbers.has_key("gate"))
        .ext(distinct_on(RetrainRun.server, RetrainRun.target))
        .order_by(RetrainRun.server, RetrainRun.target, RetrainRun.started_at.desc(), RetrainRun.id.desc())
    )
    return list(session.scalars(select(RetrainRun).where(RetrainRun.id.in_(newest))))


def list_page(
    session: Session,
    *,
    limit: int,
    cursor: Cursor | None = None,
    state: str | None = None,
    wanted: RowFilter = EVERYTHING,
) -> Sequence[RetrainRun]:
    """Newest first, at most `limit`, after the cursor, by the time at which they started.

    `state` "running" means any that has not ended.
    """
    query = select(RetrainRun)
    query = query.where(*wanted.at(RetrainRun.started_at), *wanted.of(RetrainRun.server, RetrainRun.target))
    if state == "running":
        query = query.where(RetrainRun.state.not_in(ENDED_STATES))
    elif state is not None:
        query = query.where(RetrainRun.state == state)
    return session.scalars(
        newest_first(query, RetrainRun.started_at, RetrainRun.id, limit=limit, cursor=cursor)
    ).all()
