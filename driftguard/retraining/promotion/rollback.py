"""Rollback by an operator: the draft that the one in service was trained from serves again, or the last
before that which was not found worse."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import NamedTuple, cast
from uuid import UUID

import msgspec
import structlog
from sqlalchemy.orm import Session

from driftguard.errors import BadInput, BadSettings, Conflict
from driftguard.records.documents.retraining_run import Rollout
from driftguard.retraining.engines.connect import connect
from driftguard.retraining.engines.engine_admin import (
    EngineAdmin,
    EngineAway,
    EngineDraft,
    EngineInfo,
    EngineRefused,
)
from driftguard.retraining.ledger import incident_notes
from driftguard.retraining.promotion import restart
from driftguard.retraining.promotion.draft_rows import put_in_service, run_that_made, why_unusable
from driftguard.retraining.promotion.put_back import lost_draft
from driftguard.retraining.promotion.reconcile import locked, settle_locked
from driftguard.settings import Settings
from driftguard.store import drafts, retrain_runs
from driftguard.store.database import Database
from driftguard.store.tables import Draft

log = structlog.get_logger(__name__)


def roll_back(
    database: Database, settings: Settings, *, server: str, draft_version: str, reason: str
) -> EngineDraft:
    """The draft that serves now. The order is stored, the engine acts, and the database follows (see
    reconcile.py).

    Where an engine is restarted, it is the draft that was ordered; its records are awaited.

    `draft_version`: the draft to roll back. Raises BadInput (no such engine), Conflict (a retraining runs,
    another draft is in service, or there is none to return to), EngineRefused; MayHaveActed: `settle` does
    the rest.
    """
    try:
        engine = connect(database, settings, server)
    except BadSettings as error:
        raise BadInput(error.detail, field="server") from None
    with locked(database, engine, engine.info()) as info:
        with database.session() as session:
            lost = lost_draft(session, info) if isinstance(engine, EngineAdmin) else None
        if lost is not None and lost.version == draft_version:  # not loaded again to be taken back
            draft = EngineDraft(lost.name, lost.version, lost.method, lost.directory)
            info = msgspec.structs.replace(info, draft=draft)
        else:
            info = settle_locked(database, settings, engine, info)
        if info.draft.version != draft_version:
            raise Conflict(f"draft {info.draft.version} is in service on {server}, not {draft_version}")
        with database.session() as session:
            if (under_way := restart.under_way(session, info)) is not None:
                raise Conflict(under_way)
        before = _before(database, info)
        told = f"rolled back to draft {before.version} by hand: {reason}"
        if not isinstance(engine, EngineAdmin):
            _check_files(database, before)
            return restart.roll_back_by_hand(database, engine, info, before, told)
        if all(draft.version != before.version for draft in info.drafts):
            _check_files(database, before)
            engine.load(Path(before.directory or ""), before.version)
        run = _store_order(database, info, before.version, told)
        try:
            serving = _activate(engine, before.version)
        except MayHaveActed:
            raise  # the order stays
        except EngineRefused:
            with database.session() as session:
                _withdraw(session, run)
            raise
        with database.session() as session:
            _withdraw(session, run)
            _follow(session, info, serving, told)
    return serving


class MayHaveActed(EngineRefused):
    """The engine was told to roll back, and does not answer."""


class _Before(NamedTuple):
    """The run that made the draft, before its rollback was asked for."""

    run_id: UUID
    state: retrain_runs.RunState
    reason: str | None
    ended_at: datetime | None
    rollout: Rollout | None


def _store_order(database: Database, info: EngineInfo, version: str, told: str) -> _Before | None:
    """Before the engine acts: where this is cut off afterwards, `settle` finds what was asked for, and does
    the rest. None: the run that made the draft is no longer stored."""
    with database.session() as session:
        run = run_that_made(session, info)
        if run is None:
            return None
        rollout, state = retrain_runs.numbers_of(run).rollout, cast("retrain_runs.RunState", run.state)
        before = _Before(run.id, state, run.reason, run.ended_at, rollout)
        now = retrain_runs.now(session)
        retrain_runs.change_numbers(session, run.id, rollout=Rollout(version, now, now, told))
        retrain_runs.advance(session, run.id, "rolling_back", reason=told, ended_at=None)
    return before


def _withdraw(session: Session, before: _Before | None) -> None:
    if before is not None:
        retrain_runs.change_numbers(session, before.run_id, rollout=before.rollout)
        earlier = {"reason": before.reason, "ended_at": before.ended_at}
        retrain_runs.advance(session, before.run_id, before.state, **earlier)


def _activate(engine: EngineAdmin, version: str) -> EngineDraft:
    """Raises MayHaveActed, or EngineRefused: the engine serves what it served."""
    try:
        return engine.activate(version)
    except EngineAway:  # it was not asked
        raise
    except EngineRefused as error:
        try:
            serving = engine.info().draft  # the answer may be lost although the engine acted
        except EngineRefused:
            told = f"{error.detail}; it may have acted, and is asked again as soon as it answers"
            raise MayHaveActed(told) from error
        if serving.version != version:
            raise
        return serving


def _before(database: Database, info: EngineInfo) -> Draft:
    """The row of the draft that a rollback of the one in service returns to. Raises Conflict."""
    with database.session() as session:
        serving = drafts.find(session, info.server, info.target, info.draft.version)
        if serving is None or serving.parent_version is None:
            raise Conflict(f"draft {info.draft.version} was not promoted here: there is none to return to")
        version = drafts.rollback_of(session, info.server, info.target, serving.parent_version) or ""
        before = drafts.find(session, info.server, info.target, version)
    if before is None:
        raise Conflict(f"draft {version}, to return to, is no longer stored")
    return before


def _check_files(database: Database, draft: Draft) -> None:
    """Raises Conflict: they are gone or changed."""
    with database.session() as session:
        if (unusable := why_unusable(session, draft, draft.version)) is not None:
            raise Conflict(unusable)


def _follow(session: Session, info: EngineInfo, serving: EngineDraft, told: str) -> None:
    """Ends the run that is being watched; to one that has ended only the reason is added."""
    at = retrain_runs.now(session)
    taken_back = drafts.find(session, info.server, info.target, info.draft.version)
    put_in_service(session, info.server, info.target, serving, at, former="rolled_back")
    log.warning("draft rolled back by hand", server=info.server, draft=info.draft.version, reason=told)
    watched = retrain_runs.watching(session, info.server, info.target, info.draft.version)
    if watched is not None:
        retrain_runs.end(session, watched.id, "rolled_back", told, at)
        incident_notes.end_mitigation(session, watched.incident_id, told, at)
    elif taken_back is not None and taken_back.retrain_run_id is not None:
        retrain_runs.add_to_reason(session, taken_back.retrain_run_id, told)
