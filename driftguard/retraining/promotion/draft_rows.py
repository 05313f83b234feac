"""A promoted draft in the database: put into service, watched, and rolled back.

The engine acts first and the database follows (see reconcile.py), so nothing here calls the engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from typing import Literal, cast

import structlog
from sqlalchemy.orm import Session

from driftguard.records.documents.incident import ChangedSegment, changed_since, not_back
from driftguard.records.documents.retraining_run import OldLevel
from driftguard.retraining.engines.engine_admin import EngineDraft, EngineInfo
from driftguard.retraining.ledger import incident_notes
from driftguard.retraining.promotion import watch
from driftguard.retraining.training import checksums
from driftguard.store import acceptance_levels, drafts, incidents, retrain_runs
from driftguard.store.acceptance_levels import LOOKED_UP, DraftLevel
from driftguard.store.tables import Draft, RetrainRun

_LOOK_BACK = timedelta(days=7)  # records of the old draft that show its acceptance
log = structlog.get_logger(__name__)


def follow_engine(
    session: Session,
    server: str,
    target: str,
    draft: EngineDraft,
    at: datetime,
    former: Literal["retired", "lost"] = "retired",
) -> None:
    """Stores which draft the engine serves; the state of the one before becomes `former`."""
    known = drafts.in_service(session, server, target)
    if known is not None and known.version != draft.version:
        log.info("draft in service changed", server=server, before=known.version, now=draft.version)
    put_in_service(session, server, target, draft, at, former)


def finish_promotion(
    session: Session,
    run: RetrainRun,
    draft: EngineDraft,
    at: datetime,
    *,
    tolerance: float,
    minimum_drop: float,
) -> None:
    """The engine serves the run's candidate: it is in service, its parent retired, and the watch begins.

    `tolerance`: how much less it may accept than its parent; `minimum_drop`: what is left of a fall when it
    is over may be as much as this. A server that is only scraped has no requests to watch: then the promotion
    stands.
    """
    changed: dict[str, ChangedSegment] = {}
    change_point_at = at - _LOOK_BACK
    if run.incident_id is not None:
        incident, _ = incidents.find(session, run.incident_id)
        changed = {each.segment: each for each in not_back(incident.segments)}
        change_point_at = incident.change_point_at
    levels = _old_levels(session, run, draft, at, minimum_drop, changed, change_point_at)
    numbers = retrain_runs.numbers_of(run)
    follow_engine(session, run.server, run.target, draft, at)
    reason = gate.reason if (gate := numbers.gate) else "passed the gate"
    if (rollout := numbers.rollout) is not None and rollout.live == "done":
        reason = f"{reason}; loaded without a restart"
    elif rollout is not None and rollout.not_live:
        reason = f"{reason}; by a restart, not live: {rollout.not_live}"
    if run.state == "rolling_out" and not levels:
        reason = f"{reason}; not watched: there are no records of single requests to compare with"
        retrain_runs.end(session, run.id, "promoted", reason, at)
        incident_notes.end_mitigation(session, run.incident_id, reason, at)
        return
    incident_notes.tell_promotion(session, run.incident_id, draft.version, at)
    numbers = replace(numbers, watch=watch.start(levels, tolerance, changed))
    retrain_runs.advance(session, run.id, "watching", numbers=numbers, reason=reason)


def finish_rollback(session: Session, run: RetrainRun, parent: EngineDraft, at: datetime) -> None:
    """The engine serves the parent again: the candidate is rolled back and the incident as before."""
    reason = f"{why_taken_back(run)}; {parent.version} serves again"
    if (cut_off := why_paused(run)) is not None:
        reason = f"{reason}; {cut_off}"
    put_in_service(session, run.server, run.target, parent, at, former="rolled_back")
    retrain_runs.end(session, run.id, "rolled_back", reason, at)
    incident_notes.end_mitigation(session, run.incident_id, reason, at)
    log.warning("draft rolled back", run=str(run.id), reason=reason)


def end_watch(session: Session, run: RetrainRun, because: str, at: datetime) -> None:
    """Of a draft that is not served any more, and was not found worse."""
    reason = f"promoted; no longer watched, because {because}"
    retrain_runs.end(session, run.id, "promoted", reason, at)
    incident_notes.end_mitigation(session, run.incident_id, reason, at)


def run_that_made(session: Session, info: EngineInfo) -> RetrainRun | None:
    """The run that made the draft in service, locked, as a fold may advance or end its watch; None: not
    made here, or no longer stored."""
    made = drafts.find(session, info.server, info.target, info.draft.version)
    if made is None or made.retrain_run_id is None:
        return None
    return retrain_runs.find(session, made.retrain_run_id, locked=True)


def rollback_version(session: Session, run: RetrainRun) -> str | None:
    """The draft that serves once the one of this run is rolled back; None: not known."""
    if run.state == "rolling_back":
        return retrain_runs.rollout_of(run).version
    made = drafts.find(session, run.server, run.target, run.candidate_version or "")
    parent = made.parent_version if made is not None else None
    return drafts.rollback_of(session, run.server, run.target, parent)


def tell_not_put_back(session: Session, run: RetrainRun, because: str, at: datetime) -> None:
    """The draft of the run is to be rolled back, serves on, and nothing mends its incident until it is."""
    reason = f"{why_taken_back(run)}; draft {rollback_version(session, run)} cannot be put back: {because}"
    retrain_runs.advance(session, run.id, cast("retrain_runs.RunState", run.state), reason=reason)
    incident_notes.end_mitigation(session, run.incident_id, reason, at)


def why_unusable(session: Session, draft: Draft | None, version: str) -> str | None:
    """Why the files of this draft cannot be served, with what to do; None: nothing is known against it. Where
    this machine has no drafts of ours, the server alone sees the files."""
    advice = "bring them back, as from a backup, or put another draft into service"
    directory = None if draft is None else draft.directory
    if draft is None or (directory is None and (draft.retrain_run_id or draft.method == "draft_model")):
        return f"the files of draft {version} are gone: {advice}"
    if directory is None or draft.retrain_run_id is None:
        return None
    told, path = f"the files of draft {version}, in {directory},", Path(directory)
    run = retrain_runs.find(session, draft.retrain_run_id)
    try:
        if not path.parent.is_dir():
            return None
        path.stat()
        checksums.verify_if_known(path, retrain_runs.numbers_of(run).checksums_sha256 if run else None)
    except FileNotFoundError:
        return f"{told} are gone: {advice}"
    except OSError as error:  # as of another user's directory
        return f"{told} cannot be read ({error.strerror}): {advice}"
    except checksums.DraftChanged as changed:
        return f"{changed.detail}: {advice}"
    return None


def why_paused(run: RetrainRun) -> str | None:
    """That a server may answer no request; None: nothing says so."""
    asked = retrain_runs.numbers_of(run).rollout
    if asked is None or asked.live != "begun":
        return None
    return (
        f"loading draft {asked.version} into a running server was cut off, and that server may be paused "
        "until somebody resumes or restarts it"
    )


def why_taken_back(run: RetrainRun) -> str:
    """The reason for rolling back the draft of a run that is watched or is rolling back."""
    if run.state == "rolling_back":
        return retrain_runs.rollout_of(run).reason
    return why_worse(run)


def why_worse(run: RetrainRun) -> str:
    """The reason for rolling back the draft of a watched run."""
    gate = retrain_runs.numbers_of(run).gate
    told = watch.describe(retrain_runs.watch_of(run), gate)
    return f"draft {run.candidate_version} accepted less than the one before it: {told}"


def put_in_service(
    session: Session,
    server: str,
    target: str,
    draft: EngineDraft,
    at: datetime,
    former: drafts.DraftState,
) -> None:
    """Stores that the engine serves this draft; the state of the one before becomes `former`."""
    drafts.put_in_service(
        session,
        server=server,
        target=target,
        version=draft.version,
        name=draft.name,
        method=draft.method,
        directory=draft.renewed,
        at=at,
        former=former,
    )


def _old_levels(
    session: Session,
    run: RetrainRun,
    draft: EngineDraft,
    at: datetime,
    minimum_drop: float,
    changed: Mapping[str, ChangedSegment],
    change_point_at: datetime,
) -> list[OldLevel]:
    """The parent's acceptance: in the changed segments since their change, elsewhere recently."""
    rows = acceptance_levels.levels(
        session,
        server=run.server,
        target=run.target,
        version=run.parent_version or "",
        oldest=at - _LOOK_BACK,
        since=changed_since(list(changed.values()), change_point_at),
    )
    by_first = {row.segment for row in rows if row.by_first}
    told: dict[str, float | None] = {
        name: _mean_before(change, by_first=name in by_first) for name, change in changed.items()
    }
    if draft.method in LOOKED_UP:  # its levels are of all tokens that K allows, those of the incident are not
        before = acceptance_levels.levels(
            session,
            server=run.server,
            target=run.target,
            version=run.parent_version or "",
            oldest=change_point_at - _LOOK_BACK,
            until=change_point_at,
        )
        told = {
            row.segment: row.mean
            for row in before
            if row.segment in changed and row.requests >= watch.MINIMUM_OLD_REQUESTS
        }
    return [
        _old_level(row, told.get(row.segment), minimum_drop, changed=row.segment in changed) for row in rows
    ]


def _old_level(row: DraftLevel, before: float | None, minimum_drop: float, *, changed: bool) -> OldLevel:
    # n equal requests cannot exclude a spread of 1/n, as in the detector's reference period
    error = math.sqrt(max(row.variance, 1 / row.requests) / row.requests)
    over_from = None if before is None else watch.over_from(before, row.mean, minimum_drop)
    half_from = None if before is None or before <= row.mean else (before + row.mean) / 2
    of = row.segment, changed, row.requests, row.mean, row.variance, error
    return OldLevel(*of, over_from, half_from, k=row.k, by_first=row.by_first)


def _mean_before(change: ChangedSegment, *, by_first: bool) -> float | None:
    """Of x = accepted / drafted per request, of the first draft position or of all; None where it is not
    known of these."""
    if change.after.positions != ("first" if by_first else "all"):
        return None
    return change.adjusted.before if change.adjusted is not None else change.before.rate
