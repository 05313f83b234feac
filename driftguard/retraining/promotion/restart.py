"""Promotion and rollback live or by a restart. The order is stored, then sent; records prove that it is done.

    promoting          -> rolling_out  -> watching, promoted   a record of the candidate arrived
                                       -> failed               refused, or no such record in time
    watching, promoted -> rolling_back -> rolled_back          a record of the draft before arrived

A job that settles a killed run in rolling_out or rolling_back reads the order from the run, and waits for the
same records (see reconcile.py). A promotion is ordered once; a rollback again until it is done, because the
draft in service is known to be worse. The lock is held while an order is sent, not while records are awaited.

A live update is tried first where the settings have one. It may leave the server paused where this process
is killed: `go_on` resumes it and updates again, which changes nothing where it was done.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime, timedelta
from typing import Final, Literal, cast
from uuid import UUID

import structlog
from sqlalchemy.orm import Session

from driftguard.errors import Conflict
from driftguard.records.documents.retraining_run import Rollout
from driftguard.retraining.engines.engine_admin import EngineDraft, EngineInfo, EngineRefused
from driftguard.retraining.engines.live_update import LiveUpdate, MayBePaused, NotOffered
from driftguard.retraining.engines.order import Order, PromotionStopped, Reply
from driftguard.retraining.engines.restarted_engine import RestartedEngine
from driftguard.retraining.ledger import incident_notes
from driftguard.retraining.ledger.outcome import RetrainOutcome
from driftguard.retraining.ledger.run_row import Job, advance, end
from driftguard.retraining.promotion.draft_rows import (
    rollback_version,
    run_that_made,
    tell_not_put_back,
    why_unusable,
    why_worse,
)
from driftguard.retraining.training import workspace
from driftguard.store import announced_drafts, drafts, retrain_runs, source_activity
from driftguard.store.database import Database
from driftguard.store.tables import Draft, RetrainRun

ASK_AGAIN_AFTER: Final = timedelta(minutes=5)  # for a rollback that was refused, or cut off
_Rolling = Literal["rolling_out", "rolling_back"]
log = structlog.get_logger(__name__)


def promote(
    job: Job, engine: RestartedEngine, run_id: UUID, incident_id: UUID | None, version: str
) -> RetrainOutcome:
    """Ends rolling_out or failed. Where nobody knows, the outcome is failed, the run rolling_out."""
    before = job.info.draft
    with job.database.session() as session:
        asked_at = retrain_runs.now(session)
    order = Order(
        action="promote",
        run_id=run_id,
        server=job.info.server,
        target=job.info.target,
        method=before.method,
        draft_path=str(workspace.draft_directory(job.settings.data_directory, version)),
        draft_version=version,
        previous_path=before.directory,
        previous_version=before.version,
        asked_at=asked_at,
    )
    advance(job, run_id, "promoting", f"asking for draft {version}")
    try:
        reply = _give(job.database, engine, order, "rolling_out", reason="")
    except PromotionStopped as error:
        reason = f"{error.detail}; if records of draft {version} arrive, it counts as promoted"
        return RetrainOutcome("failed", reason, None, run_id)
    except MayBePaused as error:
        return RetrainOutcome("failed", f"{error.detail}; the sidecar tries on", None, run_id)
    if reply.refusal is not None:
        return end(job, run_id, incident_id, "failed", reply.refusal)
    wait = engine.rules.promote_wait_seconds
    reason = f"draft {version} is rolled out; its records are awaited for {wait:g} s"
    return RetrainOutcome("rolling_out", reason, None, run_id)


def roll_back_if_due(database: Database, engine: RestartedEngine, info: EngineInfo) -> None:
    """Orders the draft before, where the watch says so; again where that was not done in time."""
    with database.session() as session:
        now = retrain_runs.now(session)
        found = _due_rollback(session, info, now)
        if found is None:
            return
        run, reason = found
        version = rollback_version(session, run) or ""
        before = drafts.find(session, run.server, run.target, version)
        order = _order("roll_back", run, version, before, info.draft, now)
    reply = _give(database, engine, order, "rolling_back", reason)
    with database.session() as session:
        if reply.refusal is None:
            retrain_runs.advance(session, run.id, "rolling_back", reason=reason)
            return
        told = session.get_one(RetrainRun, run.id)
        tell_not_put_back(session, told, reply.refusal, retrain_runs.now(session))
    log.error(
        "rollback refused; it is asked for again",
        run=str(run.id),
        after=str(ASK_AGAIN_AFTER),
        reason=reply.refusal,
    )


def roll_back_by_hand(
    database: Database, engine: RestartedEngine, info: EngineInfo, before: Draft, reason: str
) -> EngineDraft:
    """Orders `before`; returns it, its records are awaited. Raises Conflict, EngineRefused: not ordered."""
    with database.session() as session:
        run = retrain_runs.watching(session, info.server, info.target, info.draft.version)
        if run is None:
            run = run_that_made(session, info)
        if run is None:
            raise Conflict(f"the run that promoted draft {info.draft.version} is no longer stored")
        state = cast("retrain_runs.RunState", run.state)
        as_it_was = {"reason": run.reason, "ended_at": run.ended_at, "numbers": run.numbers}
        now = retrain_runs.now(session)
        order = _order("roll_back", run, before.version, before, info.draft, now)
        # At once: a watch that ended meanwhile would be set back.
        asked = Rollout(before.version, now, now + ASK_AGAIN_AFTER, reason)
        retrain_runs.change_numbers(session, run.id, rollout=asked)
        retrain_runs.advance(session, run.id, "rolling_back", reason=reason, ended_at=None)
    reply = _give(database, engine, order, "rolling_back", reason)
    if reply.refusal is not None:
        with database.session() as session:
            retrain_runs.advance(session, run.id, state, **as_it_was)
        raise EngineRefused(reply.refusal)
    return EngineDraft(before.name, before.version, before.method, before.directory)


def go_on(database: Database, engine: RestartedEngine, info: EngineInfo) -> None:
    """Carries out a live update again that was cut off. Waits on for records of a draft that was loaded live
    and is served, as the server says; and no longer than at first where the clock was set back. Raises
    EngineRefused.
    """
    with database.session() as session:
        rolling = retrain_runs.in_states(session, info.server, info.target, retrain_runs.ROLLING_STATES)
        now = retrain_runs.now(session)
    for run in rolling:
        state = cast("_Rolling", run.state)
        asked = retrain_runs.rollout_of(run)
        if now < asked.asked_at:
            asked = replace(asked, asked_at=now, until=now + (asked.until - asked.asked_at))
            _store(database, run.id, state, asked)
        if asked.live == "begun":
            _update_again(database, engine, info, run, state)
        is_late = asked.live == "done" and now >= asked.until
        if is_late and _says_that_it_serves(engine, asked.version):
            until = now + timedelta(seconds=engine.rules.promote_wait_seconds)
            _store(database, run.id, state, replace(asked, until=until))


def _says_that_it_serves(engine: RestartedEngine, version: str) -> bool:
    """False too where it does not answer: then the records alone decide."""
    try:
        return engine.live is not None and engine.live.version() == version
    except EngineRefused as error:
        log.warning("a draft that was loaded live cannot be asked for", version=version, reason=error.detail)
        return False


def _update_again(
    database: Database,
    engine: RestartedEngine,
    info: EngineInfo,
    run: RetrainRun,
    state: _Rolling,
) -> None:
    asked = retrain_runs.rollout_of(run)
    with database.session() as session:
        until = retrain_runs.now(session) + ASK_AGAIN_AFTER
    not_live = replace(asked, live="no", until=until)
    refusal, without = None, ""
    if engine.live is None:
        without = "an update was cut off, and engines.update_url is no longer set"
        log.error("a restart is asked for", run=str(run.id), server=run.server, reason=without)
    else:
        log.error("a live update was cut off; the server is resumed", run=str(run.id), server=run.server)
        refusal = engine.live.recover(asked.version)
    if info.draft.version == asked.version:  # its records came before this process could note that it is done
        _store(database, run.id, state, replace(asked, live="done"))
        return
    if refusal is None:
        refusal = _order_again(database, engine, info, run, state, without)
    else:
        log.error("it is not updated again now", run=str(run.id), reason=refusal)
        _store(database, run.id, state, not_live)
    if refusal is not None and state == "rolling_out":
        with database.session() as session:
            now = retrain_runs.now(session)
            retrain_runs.end(session, run.id, "failed", refusal, now)
            incident_notes.end_mitigation(session, run.incident_id, refusal, now)


def _order_again(
    database: Database,
    engine: RestartedEngine,
    info: EngineInfo,
    run: RetrainRun,
    state: _Rolling,
    not_live: str,
) -> str | None:
    """Why it was refused; None: it was not. Raises as `_give`."""
    asked = retrain_runs.rollout_of(run)
    with database.session() as session:
        wanted = drafts.find(session, run.server, run.target, asked.version)
        now = retrain_runs.now(session)
    action: Literal["promote", "roll_back"] = "promote" if state == "rolling_out" else "roll_back"
    order = _order(action, run, asked.version, wanted, info.draft, now)
    return _give(database, engine, order, state, asked.reason, not_live).refusal


def under_way(session: Session, info: EngineInfo) -> str | None:
    """The restart that was ordered and is not proved by a record yet, in words; None: none."""
    for run in retrain_runs.in_states(session, info.server, info.target, retrain_runs.ROLLING_STATES):
        asked = retrain_runs.rollout_of(run)
        told = f"a rollout of draft {asked.version} is under way since {asked.asked_at:%Y-%m-%d %H:%M:%S} UTC"
        return told if run.state == "rolling_out" else f"{told}: {run.reason}"
    return None


def is_due(session: Session, run: RetrainRun) -> bool:
    """Whether the run can be settled: the record that it waits for has arrived, or has not in time, or the
    clock was set back; or a live update was cut off."""
    asked = retrain_runs.rollout_of(run)
    if asked.live == "begun":
        return True
    came = source_activity.stream_of_rollout(session, run.server, run.target, asked)
    return came is not None or not asked.asked_at <= retrain_runs.now(session) < asked.until


def _due_rollback(session: Session, info: EngineInfo, now: datetime) -> tuple[RetrainRun, str] | None:
    """The run whose draft is to be rolled back now, and why."""
    run = retrain_runs.watching(session, info.server, info.target, info.draft.version)
    if run is not None:
        seen = retrain_runs.watch_of(run)
        if seen.verdict != "worse" or run.parent_version is None:
            return None
        return run, why_worse(run)
    for rolling in retrain_runs.in_states(session, info.server, info.target, ("rolling_back",)):
        if rolling.candidate_version == info.draft.version and now >= retrain_runs.rollout_of(rolling).until:
            log.error("rollback not done in time; it is asked for again", run=str(rolling.id))
            return rolling, retrain_runs.rollout_of(rolling).reason
    return None


def _order(
    action: Literal["promote", "roll_back"],
    run: RetrainRun,
    version: str,
    wanted: Draft | None,
    serving: EngineDraft,
    asked_at: datetime,
) -> Order:
    return Order(
        action=action,
        run_id=run.id,
        server=run.server,
        target=run.target,
        method=wanted.method if wanted else serving.method,
        draft_path=wanted.directory if wanted else None,
        draft_version=version,
        previous_path=serving.directory,
        previous_version=serving.version,
        asked_at=asked_at,
    )


def _give(
    database: Database,
    engine: RestartedEngine,
    order: Order,
    state: _Rolling,
    reason: str,
    not_live: str = "",
) -> Reply:
    """Stores the order, carries it out or sends it, stores the reply.

    Raises PromotionStopped: it may have been received; MayBePaused: `go_on` has to go on.
    """
    wait = timedelta(seconds=engine.rules.promote_wait_seconds)
    # Of a rollback that is cut off the order may never have been given, and the worse draft serves on.
    longest = timedelta(seconds=engine.rules.promote_timeout_seconds) + wait
    longest = longest if order.action == "promote" else min(longest, ASK_AGAIN_AFTER)
    with database.session() as session:
        heard = source_activity.heard(session, order.server, order.target, order.draft_version)
    until = order.asked_at + longest
    asked = Rollout(order.draft_version, order.asked_at, until, reason, not_live=not_live, heard=heard)
    reply = None
    if engine.live is not None:
        reply, asked = _update_live(database, engine.live, order, state, asked)
    if reply is None:
        reply = _ask_for_restart(database, engine, order, state, asked)
    after = wait if reply.refusal is None else ASK_AGAIN_AFTER
    with database.session() as session:
        until = retrain_runs.now(session) + after
    _store(database, order.run_id, state, replace(asked, until=until, output=reply.output))
    return reply


def _update_live(
    database: Database, live: LiveUpdate, order: Order, state: _Rolling, asked: Rollout
) -> tuple[Reply | None, Rollout]:
    """No reply where it is not offered. Raises MayBePaused."""
    _store(database, order.run_id, state, replace(asked, live="begun"))
    try:
        with database.session() as session:
            digest = _digest(session, order)
        live.replace(order, digest)
    except MayBePaused as error:
        with database.session() as session:
            retrain_runs.advance(session, order.run_id, state, reason=error.detail)
        raise
    except NotOffered as error:
        log.warning("no live update; a restart is asked for", server=order.server, reason=error.detail)
        return None, replace(asked, not_live=error.detail)
    except EngineRefused as error:
        log.error("live update failed", server=order.server, reason=error.detail)
        return Reply(refusal=error.detail), asked
    log.info("draft loaded live", server=order.server, version=order.draft_version)
    with database.session() as session:
        announced_drafts.announce(session, order.server, order.draft_version, "until_restart")
    return Reply(), replace(asked, live="done")


def _digest(session: Session, order: Order) -> str | None:
    """Of the checksums of the draft's files, where a run of ours made it. Raises EngineRefused: they are
    gone."""
    made = drafts.find(session, order.server, order.target, order.draft_version)
    if made is not None and made.retrain_run_id is not None and order.draft_path is None:
        raise EngineRefused(f"the files of draft {order.draft_version} are gone")
    run = retrain_runs.find(session, made.retrain_run_id) if made and made.retrain_run_id else None
    return retrain_runs.numbers_of(run).checksums_sha256 if run else None


def _ask_for_restart(
    database: Database, engine: RestartedEngine, order: Order, state: _Rolling, asked: Rollout
) -> Reply:
    with database.session() as session:
        wanted = drafts.find(session, order.server, order.target, order.draft_version)
        if (unusable := why_unusable(session, wanted, order.draft_version)) is not None:
            return Reply(refusal=unusable)
    # The order first: who finds it withdraws what is announced, where this process is killed before it ends.
    _store(database, order.run_id, state, asked)
    with database.session() as session:  # before the restart, which brings it into effect
        announced_drafts.announce(session, order.server, order.draft_version, "after_restart")
    reply = engine.tell(order)
    if reply.refusal is None:
        return reply
    with database.session() as session:
        announced_drafts.withdraw(
            session,
            order.server,
            order.draft_version,
            order.previous_version,
            since=order.asked_at,
        )
    not_live = f"; not loaded live: {asked.not_live}" if asked.not_live else ""
    return replace(reply, refusal=f"{reply.refusal}{not_live}")


def _store(database: Database, run_id: UUID, state: retrain_runs.RunState, rollout: Rollout) -> None:
    with database.session() as session:
        run = retrain_runs.find(session, run_id)
        if run is not None:
            numbers = replace(retrain_runs.numbers_of(run), rollout=rollout)
            retrain_runs.advance(session, run_id, state, numbers=numbers, ended_at=None)
