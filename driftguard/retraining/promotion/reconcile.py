"""Brings database and files to what the engine serves, whatever a killed run left behind.

killed while                      found as                                   becomes
collecting, training, evaluating  run unended, lock free                     failed ("interrupted"), also
                                                                             where the engine is away
any of another target             run unended, lock free                     failed; a watch ends
promoting, before the swap        run promoting, the parent in service       failed ("interrupted")
promoting, after the swap         run promoting, the candidate in service    watching: the promotion counts
rolling back, after the swap      run watching, verdict worse, or            rolled_back
                                  rolling_back by hand; the draft before
                                  in service
rolling out                       run rolling_out, no record of the          as it is; failed when time is up
                                  candidate
rolling out, cut off while live   run rolling_out, the update begun          resumed, and updated again; by a
                                                                             restart where the settings lost
                                                                             update_url, failed where they
                                                                             got an admin_url
rolling out, restarted            run rolling_out, records of the candidate  watching: the promotion counts
rolling back                      run rolling_back, no record of the         as it is; asked for again when
                                  draft before                               time is up, of an engine with an
                                                                             admin_url at once
rolling back, restarted           run rolling_back, records of the draft     rolled_back
                                  before
failed, and served all the same   run failed, its candidate in service in    watching: the promotion counts
                                  place of its parent
promoted, and lost by the engine  its first draft in service, by no order    put back (put_back.py), else lost
anything else in service          the engine was told so by somebody else    in service; a watch ends
with nobody to go on with it      see abandoned.py                           failed, or promoted; says why
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Literal, cast

import msgspec
import structlog
from sqlalchemy.orm import Session

from driftguard.errors import Conflict
from driftguard.retraining.engines.connect import Engine, connect
from driftguard.retraining.engines.engine_admin import EngineAdmin, EngineDraft, EngineInfo, EngineRefused
from driftguard.retraining.ledger import incident_notes
from driftguard.retraining.promotion import abandoned, restart
from driftguard.retraining.promotion.draft_rows import (
    end_watch,
    finish_promotion,
    finish_rollback,
    follow_engine,
    rollback_version,
    tell_not_put_back,
    why_paused,
    why_taken_back,
    why_unusable,
)
from driftguard.retraining.promotion.put_back import LOST, Loss, is_lost_live, put_back_if_lost
from driftguard.retraining.training import workspace
from driftguard.settings import Settings
from driftguard.store import announced_drafts, drafts, retrain_runs
from driftguard.store.database import Database
from driftguard.store.tables import RetrainRun

log = structlog.get_logger(__name__)


def settle(
    database: Database, settings: Settings, server: str, should_stop: Callable[[], bool] = lambda: False
) -> None:
    """Settles one server, rolling back where the watch says so.

    Raises Conflict while a retraining runs there or speculation is off, EngineRefused, BadSettings (no such
    engine).
    """
    engine = connect(database, settings, server, should_stop)
    try:
        info = engine.info()
    except EngineRefused as error:
        end_killed(database, settings, server)
        _tell_cut_off(database, server, error.detail)
        raise
    if info.draft.method == "none":
        end_killed(database, settings, server)
        raise Conflict(f"{server} serves without speculation: which draft it would serve is unknown")
    with locked(database, engine, info) as info:
        settle_locked(database, settings, engine, info)


def _tell_cut_off(database: Database, server: str, unanswered: str) -> None:
    """Of the runs that wait for an engine which does not answer, and may have left a server paused."""
    with database.session() as session:
        for run in retrain_runs.unended(session):
            if run.server == server and (cut_off := why_paused(run)) is not None:
                state = cast("retrain_runs.RunState", run.state)
                retrain_runs.advance(session, run.id, state, reason=f"{cut_off}; {unanswered}")


@contextmanager
def locked(database: Database, engine: Engine, before: EngineInfo) -> Iterator[EngineInfo]:
    """What the engine serves once the lock of its server and target is held: who held it may have changed
    what was `before`. Raises Conflict (a retraining runs there), EngineRefused."""
    with retrain_runs.try_lock(database, before.server, before.target) as lock:
        if lock is None:
            raise Conflict(f"a retraining of {before.server} / {before.target} is running")
        yield engine.info()


def end_killed(
    database: Database, settings: Settings, server: str, *, serving_target: str | None = None
) -> None:
    """Ends the killed runs that had not begun to change what serves, and removes their files: an engine that
    does not answer may be away for hours, and one that is no longer in the settings for ever.

    `serving_target`: the runs of other targets alone, which it has taken the place of, and with them those
    that had begun to.
    """
    states = retrain_runs.PREPARING_STATES if serving_target is None else retrain_runs.LOCKED_STATES
    left = "the draft in service is as it was"
    if serving_target is not None:
        left = f"target {serving_target} is served now"
    with database.session() as session:
        killed = [
            run
            for run in retrain_runs.unended(session)
            if run.server == server and run.state in states and run.target != serving_target
        ]
    for server_and_target in {(run.server, run.target) for run in killed}:
        with retrain_runs.try_lock(database, *server_and_target) as lock, database.session() as session:
            if lock is not None:
                for run in retrain_runs.in_states(session, *server_and_target, states):
                    _end_interrupted(session, run, left, retrain_runs.now(session))
    workspace.remove_leftovers(database, settings.data_directory)


def settle_locked(database: Database, settings: Settings, engine: Engine, info: EngineInfo) -> EngineInfo:
    """As `settle`, by the holder of the lock; returns what the engine serves now. Raises EngineRefused.

    While speculation is off it is unknown which draft would serve: all is left as it is.
    """
    if info.draft.method == "none":
        log.warning("speculation is off; nothing is settled", server=info.server)
        return info
    loss: Loss | None = None
    if not isinstance(engine, EngineAdmin):
        restart.go_on(database, engine, info)
        restart.roll_back_if_due(database, engine, info)
    elif restored := _roll_back_if_worse(database, engine, info):
        info = msgspec.structs.replace(info, draft=restored)
    elif loss := put_back_if_lost(database, engine, info):
        info = msgspec.structs.replace(info, draft=loss.serving)
    with database.session() as session:
        now = retrain_runs.now(session)
        _go_on_with_late(session, info, now)
        running = retrain_runs.in_states(session, info.server, info.target, retrain_runs.RUNNING_STATES)
        if loss is None and all(run.candidate_version != info.draft.version for run in running):
            _tell_replaced(session, info, now)
        is_lost = loss is not None or is_lost_live(session, info)
        for run in running:
            _settle_run(session, settings, run, info.draft, now, loss)
        former: Literal["retired", "lost"] = "lost" if is_lost else "retired"
        follow_engine(session, info.server, info.target, info.draft, now, former)
        if loss is not None:
            retrain_runs.add_to_reason(session, loss.run_id, loss.told, instead_of=LOST)
        if isinstance(engine, EngineAdmin):
            _end_watches_of_other_targets(session, info, now)
    end_killed(database, settings, info.server, serving_target=info.target)
    abandoned.end_of_replaced(database, info.server, info.target)
    workspace.remove_old_drafts(database, settings, info.server, info.target)
    return info


def _tell_replaced(session: Session, info: EngineInfo, now: datetime) -> None:
    """Of a promotion that stood. Somebody put another draft into service, or a restart of the server lost one
    that was loaded live."""
    known = drafts.in_service(session, info.server, info.target)
    if known is None or known.version == info.draft.version or known.retrain_run_id is None:
        return
    run = retrain_runs.find(session, known.retrain_run_id)
    if run is not None and run.state == "promoted":
        told = f"draft {info.draft.version} was found in its place at {now:%Y-%m-%d %H:%M:%S} UTC, by no run"
        log.warning("promoted draft replaced", server=info.server, draft=known.version, reason=told)
        retrain_runs.add_to_reason(session, run.id, told)


def _go_on_with_late(session: Session, info: EngineInfo, now: datetime) -> None:
    """The run whose candidate came into service after the run had failed: a restart that lasted longer, or a
    call that took effect without an answer. It passed the gate, and is promoted as any."""
    known = drafts.in_service(session, info.server, info.target)
    made = drafts.find(session, info.server, info.target, info.draft.version)
    run = None
    if known is not None and made is not None and made.retrain_run_id is not None:
        run = retrain_runs.find(session, made.retrain_run_id)
    if known is None or run is None or (run.state, run.candidate_version) != ("failed", info.draft.version):
        return
    numbers = retrain_runs.numbers_of(run)
    if run.parent_version != known.version or numbers.gate is None or not numbers.gate.promote:
        return
    told = f"it came into service late, after: {run.reason}"
    log.warning("a draft came into service after its run had failed", run=str(run.id), reason=run.reason)
    gate = replace(numbers.gate, reason=f"{numbers.gate.reason}; {told}")
    state: retrain_runs.RunState = "promoting" if numbers.rollout is None else "rolling_out"
    retrain_runs.advance(session, run.id, state, ended_at=None, numbers=replace(numbers, gate=gate))
    incident_notes.begin_mitigation(session, run.incident_id, told, now)


def _roll_back_if_worse(database: Database, admin: EngineAdmin, info: EngineInfo) -> EngineDraft | None:
    """The draft before, if this has put it back into service; it is loaded first where it is not. Else None.

    Also where a person asked for it and that was cut off, or where a restart was to do it, before the
    settings had the engine's admin_url."""
    with database.session() as session:
        run = retrain_runs.taken_back(session, info.server, info.target, info.draft.version)
        version = rollback_version(session, run) if run is not None else None
        if run is None or version is None:
            return None
        before = drafts.find(session, info.server, info.target, version)
        is_loaded = any(draft.version == version for draft in info.drafts)
        unusable = None if is_loaded else why_unusable(session, before, version)
        if unusable is not None:
            tell_not_put_back(session, run, unusable, retrain_runs.now(session))
    if unusable is not None:
        raise EngineRefused(unusable)
    try:
        if before is not None and before.directory is not None and not is_loaded:
            admin.load(Path(before.directory), version)
        return admin.activate(version)
    except EngineRefused as error:  # it is asked again, and the worse draft serves until then
        with database.session() as session:
            tell_not_put_back(session, run, error.detail, retrain_runs.now(session))
        raise


def _settle_run(
    session: Session,
    settings: Settings,
    run: RetrainRun,
    serving: EngineDraft,
    now: datetime,
    loss: Loss | None,
) -> None:
    is_candidate = run.candidate_version == serving.version
    if run.state in ("promoting", "rolling_out") and is_candidate:
        finish_promotion(
            session,
            run,
            serving,
            now,
            tolerance=settings.retraining.maximum_regression,
            minimum_drop=settings.detection.minimum_drop,
        )
    elif run.state == "rolling_out":
        _fail_if_late(session, run, serving, now)
    elif run.state in retrain_runs.LOCKED_STATES:
        _end_interrupted(session, run, f"draft {serving.version} is in service", now)
    elif run.state in retrain_runs.ENDED_STATES:
        return  # the detector has ended its watch since it was read
    elif not is_candidate and _is_back(session, run, serving):
        finish_rollback(session, run, serving, now)
    elif not is_candidate:
        instead = f"draft {serving.version} is in service now"
        reason = f"promoted; no longer watched, because {instead}"
        if retrain_runs.is_taken_back(run):
            before = rollback_version(session, run)
            reason = f"{why_taken_back(run)}; draft {before} was not put back, because {instead}"
        retrain_runs.end(session, run.id, "promoted", reason, now)  # which gets to know of a loss afterwards
        told = reason if loss is None else f"{reason}; {loss.told}"
        incident_notes.end_mitigation(session, run.incident_id, told, now)


def _is_back(session: Session, run: RetrainRun, serving: EngineDraft) -> bool:
    """Whether this draft serves because that of the run is rolled back."""
    return retrain_runs.is_taken_back(run) and serving.version in (
        run.parent_version,
        rollback_version(session, run),
    )


def _end_watches_of_other_targets(session: Session, info: EngineInfo, now: datetime) -> None:
    """An engine with an admin API has one target, and serves no draft of an earlier one any more."""
    for run in retrain_runs.unended(session):
        if run.server == info.server and run.target != info.target and run.state == "watching":
            end_watch(session, run, f"target {info.target} is served now", now)


def _end_interrupted(session: Session, run: RetrainRun, serving: str, now: datetime) -> None:
    reason = f"interrupted while {run.state}; {serving}"
    log.warning("interrupted retraining found", run=str(run.id), state=run.state)
    retrain_runs.end(session, run.id, "failed", reason, now)
    incident_notes.end_mitigation(session, run.incident_id, reason, now)


def _fail_if_late(session: Session, run: RetrainRun, serving: EngineDraft, now: datetime) -> None:
    """Late at once is what was cut off on the way to a server that the settings have no update_url of any
    more: another engine answers in its place."""
    asked = retrain_runs.rollout_of(run)
    reason = why_paused(run)
    if reason is None:
        if now < asked.until:
            return
        waited = round((asked.until - asked.asked_at).total_seconds())
        reason = f"no record of draft {asked.version} has arrived within {waited} s of asking for it"
    reason = f"{reason}; draft {serving.version} is in service"
    log.error("rollout failed", run=str(run.id), reason=reason)
    announced_drafts.withdraw(session, run.server, asked.version, serving.version, since=asked.asked_at)
    retrain_runs.end(session, run.id, "failed", reason, now)
    incident_notes.end_mitigation(session, run.incident_id, reason, now)
