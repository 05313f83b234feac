"""Drafts: which one is in service, which were candidates, and which directories may go."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from datetime import datetime
from typing import Final, Literal, NamedTuple
from uuid import UUID

from sqlalchemy import ARRAY, ColumnElement, Text, and_, func, literal, or_, select, tuple_, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from driftguard.records import Instant
from driftguard.store.row_filter import EVERYTHING, RowFilter, RowId, newest_first
from driftguard.store.tables import Draft, RetrainRun

DraftState = Literal["candidate", "rejected", "in_service", "retired", "rolled_back", "lost"]

CORPORA: Final = ("suffix", "ngram", "hybrid")  # methods whose drafts, or a part of them, hold captured text

_KEY: Final = (Draft.server, Draft.target, Draft.version)
_HAS_FILES: Final = Draft.directory.is_not(None), Draft.retrain_run_id.is_not(None)  # that were made here
# And not chosen since: a run fails whose worse draft somebody wants to go on from.
_FOUND_WORSE: Final = or_(
    Draft.state == "rolled_back",
    and_(
        RetrainRun.state.in_(("watching", "rolling_back", "promoted")),
        RetrainRun.numbers["watch"]["verdict"].astext == "worse",
    ),
)


class Cursor(NamedTuple):
    """The last draft of the page before: newest first, by (created_at, id)."""

    created_at: Instant
    id: RowId


def find(session: Session, server: str, target: str, version: str) -> Draft | None:
    return session.scalar(select(Draft).where(*_is(server, target), Draft.version == version))


def in_service(session: Session, server: str, target: str) -> Draft | None:
    """The draft that the database believes to be in service; the engine has the last word."""
    return session.scalar(select(Draft).where(*_is(server, target), Draft.state == "in_service"))


def in_service_of_server(session: Session, server: str) -> Draft | None:
    """The same where the target is not known, for example because the engine does not answer."""
    query = select(Draft).where(Draft.server == server, Draft.state == "in_service")
    return session.scalar(query.order_by(Draft.promoted_at.desc().nulls_last()).limit(1))


def lineage(session: Session, draft: Draft | None) -> Iterator[Draft]:
    """The draft, the one that it was made from, and so on, as far as they are known."""
    seen: set[str] = set()
    while draft is not None and draft.version not in seen:
        yield draft
        seen.add(draft.version)
        draft = find(session, draft.server, draft.target, draft.parent_version or "")


def add_candidate(
    session: Session,
    *,
    server: str,
    target: str,
    version: str,
    method: str,
    directory: str,
    parent_version: str,
    run_id: UUID,
    at: datetime,
) -> None:
    """Stores a candidate. The same weights again (training is deterministic) become a candidate again. Where
    it was made from a draft that was made from it, it keeps its first parent, to which a rollback returns."""
    parent = find(session, server, target, parent_version)
    first = next((one.parent_version for one in lineage(session, parent) if one.version == version), None)
    values = {
        "name": version,
        "method": method,
        "directory": directory,
        "parent_version": first or parent_version,
        "state": "candidate",
        "created_at": at,
        "retrain_run_id": run_id,
    }
    statement = insert(Draft).values(server=server, target=target, version=version, **values)
    session.execute(statement.on_conflict_do_update(constraint="uq_drafts_version", set_=values))


def put_in_service(
    session: Session,
    *,
    server: str,
    target: str,
    version: str,
    name: str,
    method: str,
    directory: str | None,
    at: datetime,
    former: DraftState = "retired",
) -> None:
    """Records that the engine serves this version now; whatever was in service becomes `former`. One that was
    lost before is retired: it is missed until another one is put into service.

    Recording what is recorded already changes nothing, so it can be repeated after a crash.
    """
    others = *_is(server, target), Draft.version != version
    serving = select(Draft.id).where(*others, Draft.state == "in_service")
    session.execute(
        update(Draft).where(*others, Draft.state == "lost", serving.exists()).values(state="retired"),
        execution_options={"synchronize_session": False},
    )
    session.execute(
        update(Draft).where(*others, Draft.state == "in_service").values(state=former, retired_at=at)
    )
    statement = insert(Draft).values(
        server=server,
        target=target,
        version=version,
        name=name,
        method=method,
        directory=directory,
        state="in_service",
        created_at=at,
        promoted_at=at,
    )
    statement = statement.on_conflict_do_update(
        constraint="uq_drafts_version",
        set_={
            "name": name,
            "method": method,
            "directory": directory,
            "state": "in_service",
            "promoted_at": at,
            "retired_at": None,
        },
        where=Draft.state != "in_service",
    )
    session.execute(statement)
    if directory is not None:  # one that is from elsewhere may have been moved
        served = update(Draft).where(*_is(server, target), Draft.version == version)
        moved = served.where(Draft.retrain_run_id.is_(None), Draft.directory != directory)
        session.execute(moved.values(directory=directory))


def in_service_anew(session: Session, draft_id: int, at: datetime | None) -> None:
    """Of the draft in service: since then, because the engine lost it for a while."""
    session.execute(update(Draft).where(Draft.id == draft_id).values(promoted_at=at))


_Parents = dict[tuple[str, str, str], str]  # (server, target, version) -> the one that it was trained from


def rollbacks_in_service(session: Session) -> _Parents:
    """(server, target, version in service) -> the version that its rollback returns to, where that is
    known."""
    return _rollbacks(session, _parents(session, Draft.state == "in_service"))


def rollback_of(session: Session, server: str, target: str, parent_version: str | None) -> str | None:
    """The version that a rollback of a draft with this parent returns to: the parent, or where that was found
    worse itself and replaced before its rollback, the last one before it that was not."""
    if parent_version is None:
        return None
    (found,) = _rollbacks(session, {(server, target, ""): parent_version}).values()
    return found


def _rollbacks(session: Session, parents: _Parents) -> _Parents:
    """Step by step, so that it reads the documents of these few runs and not of all that there ever were."""
    worse: _Parents = {}
    asked = {(server, target, parent) for (server, target, _), parent in parents.items()}
    while asked:
        found = _parents(session, _is_one_of(asked), _FOUND_WORSE)
        worse |= found
        asked = {(server, target, parent) for (server, target, _), parent in found.items()} - worse.keys()
    return {of: _before(worse, *of[:2], parent) for of, parent in parents.items()}


def _parents(session: Session, *which: ColumnElement[bool]) -> _Parents:
    query = select(*_KEY, Draft.parent_version)
    query = query.outerjoin(RetrainRun, RetrainRun.id == Draft.retrain_run_id)
    rows = session.execute(query.where(Draft.parent_version.is_not(None), *which))
    return {(server, target, version): parent for server, target, version, parent in rows if parent}


def _is_one_of(keys: Collection[tuple[str, str, str]]) -> ColumnElement[bool]:
    """Three parameters, however many they are."""
    arrays = (literal(list(column), ARRAY(Text)) for column in zip(*keys, strict=True))
    asked = func.unnest(*arrays).table_valued(*(column.key for column in _KEY)).render_derived()
    return tuple_(*_KEY).in_(select(asked))


def _before(worse: _Parents, server: str, target: str, version: str) -> str:
    seen: set[str] = set()
    while (before := worse.get((server, target, version))) is not None and version not in seen:
        seen.add(version)
        version = before
    return version


def counts(session: Session) -> list[tuple[str, str, str, int]]:
    """(server, target, state, how many) of all drafts known."""
    query = select(Draft.server, Draft.target, Draft.state, func.count())
    query = query.group_by(Draft.server, Draft.target, Draft.state)
    return [(server, target, state, count) for server, target, state, count in session.execute(query)]


def in_service_since(session: Session) -> list[tuple[str, str, str, datetime]]:
    """(server, target, version, when it was put into service) of every draft in service."""
    query = select(Draft.server, Draft.target, Draft.version, Draft.promoted_at)
    rows = session.execute(query.where(Draft.state == "in_service", Draft.promoted_at.is_not(None)))
    return [(server, target, version, at) for server, target, version, at in rows if at]


def reject(session: Session, server: str, target: str, version: str, at: datetime) -> None:
    """The gate refused this candidate."""
    session.execute(
        update(Draft)
        .where(*_is(server, target), Draft.version == version, Draft.state == "candidate")
        .values(state="rejected", retired_at=at)
    )


def of_runs(session: Session, run_ids: Sequence[UUID]) -> Sequence[Draft]:
    """What these retrainings made."""
    return session.scalars(select(Draft).where(Draft.retrain_run_id.in_(run_ids))).all()


def places_of_corpora(session: Session, made_before: datetime) -> list[tuple[str, str]]:
    """(server, target) of the corpora made here, before that time, whose files are not removed yet."""
    query = select(Draft.server, Draft.target).distinct().order_by(Draft.server, Draft.target)
    rows = session.execute(
        query.where(*_HAS_FILES, Draft.method.in_(CORPORA), Draft.created_at < made_before)
    )
    return [(server, target) for server, target in rows]


def removable(
    session: Session, server: str, target: str, keep: int, oldest_corpus: datetime, *, is_served: bool = True
) -> list[Draft]:
    """Drafts made here whose directories may go: all but the newest `keep`, and corpora made before
    `oldest_corpus`; never the one in service, nor that to which a rollback returns, nor of models its parent
    and that to which a second rollback returns. `is_served`: whether the target is: else nothing drafts from
    the corpus that was in service for it."""
    serving = in_service(session, server, target)
    needed: set[str | None] = set()
    kept: set[str | None] = set()
    if serving is not None:
        back = rollback_of(session, server, target, serving.parent_version)
        before = find(session, server, target, back or "")
        needed = {serving.version, back}
        kept = needed | {serving.parent_version}
        if before is not None:
            kept.add(rollback_of(session, server, target, before.parent_version))
    made = session.scalars(
        select(Draft)
        .where(*_is(server, target), *_HAS_FILES)
        .order_by(Draft.created_at.desc(), Draft.id.desc())
    ).all()

    def may_go(place: int, draft: Draft) -> bool:
        if draft.method in CORPORA and draft.created_at < oldest_corpus:
            return draft.version not in needed or not is_served
        return draft.version not in kept and place >= keep

    return [draft for place, draft in enumerate(made) if may_go(place, draft)]


def forget_directory(session: Session, draft_id: int) -> None:
    session.execute(update(Draft).where(Draft.id == draft_id).values(directory=None))


def uses_of_files(session: Session, draft: Draft) -> int:
    """How many drafts live in its directory, by whatever path: equal weights of two servers share one."""
    is_same = (Draft.directory == draft.directory) | (and_(*_HAS_FILES) & (Draft.version == draft.version))
    return session.scalar(select(func.count()).where(is_same)) or 0


def is_of_run(session: Session, directory: str) -> bool:
    """Whether a draft that was made here is in it."""
    made = select(Draft.id).where(Draft.directory == directory, Draft.retrain_run_id.is_not(None))
    return session.scalar(made.limit(1)) is not None


def list_page(
    session: Session,
    *,
    limit: int,
    cursor: Cursor | None = None,
    state: str | None = None,
    wanted: RowFilter = EVERYTHING,
) -> Sequence[Draft]:
    """Newest first, at most `limit`, after the cursor, by the time at which they became known."""
    query = select(Draft).where(*wanted.at(Draft.created_at), *wanted.of(Draft.server, Draft.target))
    if state is not None:
        query = query.where(Draft.state == state)
    return session.scalars(newest_first(query, Draft.created_at, Draft.id, limit=limit, cursor=cursor)).all()


def _is(server: str, target: str) -> tuple[ColumnElement[bool], ColumnElement[bool]]:
    return Draft.server == server, Draft.target == target
