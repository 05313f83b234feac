"""Runs that nobody can go on with end, and say why: their server is in no sidecar's settings, or another
target took the place of theirs. A server that is only away is waited for."""

from __future__ import annotations

from typing import Final, Literal

import structlog
from sqlalchemy.orm import Session

from driftguard.retraining.ledger import incident_notes
from driftguard.retraining.promotion.draft_rows import end_watch, why_worse
from driftguard.store import announced_drafts, retrain_runs, source_activity
from driftguard.store.database import Database
from driftguard.store.tables import RetrainRun

_STATES: Final = ("promoting", *retrain_runs.ROLLING_STATES, "watching")
log = structlog.get_logger(__name__)


def end_of_server(database: Database, server: str) -> None:
    """Of one that no sidecar has in its settings any more."""
    because = f"no sidecar has {server} among its engines any more"
    for target in _targets(database, server):
        with retrain_runs.try_lock(database, server, target) as lock, database.session() as session:
            for run in _stuck(session, server, target) if lock is not None else ():
                tells = "" if run.state == "watching" else ": its records tell what it serves"
                _end(session, run, "failed", f"{because}{tells}")


def end_of_replaced(database: Database, server: str, serving_target: str) -> None:
    """Of the targets that this one took the place of; with them the watches, which no record moves on."""
    because = f"target {serving_target} is served instead"
    for target in _targets(database, server) - {serving_target}:
        with retrain_runs.try_lock(database, server, target) as lock, database.session() as session:
            silence = source_activity.silence(session, server, target)
            if lock is None or (silence is not None and silence < source_activity.REPLACED_AFTER):
                continue
            for run in _stuck(session, server, target):
                has_served = run.state in ("watching", "rolling_back")
                state: Literal["promoted", "failed"] = "promoted" if has_served else "failed"
                _end(session, run, state, because)
            for run in retrain_runs.in_states(session, server, target, ("watching",)):
                end_watch(session, run, because, retrain_runs.now(session))


def _targets(database: Database, server: str) -> set[str]:
    with database.session() as session:
        unended = retrain_runs.unended(session)
    return {run.target for run in unended if run.server == server and run.state in _STATES}


def _stuck(session: Session, server: str, target: str) -> list[RetrainRun]:
    """What was ordered had its time, and what is worse was to be rolled back at once."""
    now = retrain_runs.now(session)
    return [
        run
        for run in retrain_runs.in_states(session, server, target, _STATES)
        if run.state == "promoting"
        or (run.state == "watching" and retrain_runs.watch_of(run).verdict == "worse")
        or (run.state in retrain_runs.ROLLING_STATES and now >= retrain_runs.rollout_of(run).until)
    ]


def _end(session: Session, run: RetrainRun, state: Literal["promoted", "failed"], because: str) -> None:
    now = retrain_runs.now(session)
    reason = f"draft {run.candidate_version} was being put into service, and {because}"
    if run.state == "watching":
        reason = f"{why_worse(run)}; it was not rolled back, because {because}"
    elif run.state in retrain_runs.ROLLING_STATES:
        asked = retrain_runs.rollout_of(run)
        if run.state == "rolling_back":
            reason = f"{asked.reason}; draft {asked.version} was being put back, and {because}"
        if asked.live == "begun":
            reason = f"{reason}; an update was cut off, and it may be paused"
        announced_drafts.withdraw(session, run.server, asked.version, "", since=now)
    log.error("a run ended that nobody can go on with", run=str(run.id), was=run.state, reason=reason)
    retrain_runs.end(session, run.id, state, reason, now)
    incident_notes.end_mitigation(session, run.incident_id, reason, now)
