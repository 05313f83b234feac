"""The watch in the detector's fold: reads the promoted draft's records in the transaction that folds them.

Nothing here waits for the engine: the need of a rollback is only stored; the job that tasks.py defers does
it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime

import structlog
from sqlalchemy.orm import Session

from driftguard.incidents import recovery
from driftguard.records.documents.retraining_run import OldLevel, Watch
from driftguard.retraining.ledger import incident_notes
from driftguard.retraining.promotion import watch
from driftguard.store import drafts, folding, incidents, retrain_runs
from driftguard.store.acceptance_levels import LOOKED_UP
from driftguard.store.folding import StoredRecord
from driftguard.store.tables import RetrainRun, Stream

_WATCHED = "watched draft versions"
_UNTIL = f"watched until {watch.WATCHED_REQUESTS:,} requests"
log = structlog.get_logger(__name__)


def watch_promoted(
    session: Session, stream: Stream, records: Sequence[StoredRecord], findings: Sequence[object]
) -> None:
    """An `after_fold` of the pipeline: advances the watch of this stream's draft, if it is being watched.

    Says that the incident has recovered in part when every changed segment is shown better than it was with
    the old draft, and resolves it when every one is shown to be back, or when the promotion stands, which
    ends the watch; notes when the draft is worse, so that it is rolled back.
    """
    del findings
    if (stream.server, stream.target, stream.draft_version) not in _watched(session):
        return
    run = retrain_runs.watching(session, stream.server, stream.target, stream.draft_version)
    if run is None:
        return
    before = retrain_runs.watch_of(run)
    levels = {part.old.segment: part.old for part in before.segments}
    requests = [_compared(stream, row, levels.get(row.segment)) for row in records if row.kind == "request"]
    now = watch.fold(before, requests)
    if now == before:
        return
    numbers = replace(retrain_runs.numbers_of(run), watch=now)
    retrain_runs.advance(session, run.id, "watching", numbers=numbers)
    at = datetime.now(UTC)
    if now.half and not before.half:
        incident_notes.tell_half(session, run.incident_id, at)
    if now.over and not before.over:
        _resolve(session, run, f"{_recovery(session, stream, run, now)}; {_UNTIL}", at)
    elif now.recovered and not now.over:
        found = _recovery(session, stream, run, now)
        if not before.recovered:
            incident_notes.recover_in_part(session, run.incident_id, found, f"{found}; {_UNTIL}", at)
        elif now.requests.bit_length() > before.requests.bit_length():  # they have doubled
            incident_notes.tell_recovery(session, run.incident_id, found)
    if now.verdict == "worse":
        log.warning("promoted draft is worse", run=str(run.id), evidence=watch.evidence_of_worse(now))
    elif now.verdict == "stands":
        _stands(session, stream, run, now, at)


def _compared(stream: Stream, row: StoredRecord, level: OldLevel | None) -> tuple[str | None, int, int]:
    """Its segment, and what it drafted and accepted as the old draft's level counts that; no segment where it
    cannot be counted so."""
    if level is not None and level.by_first:
        if not row.drafted_per_position or not row.accepted_per_position or not row.drafted_per_position[0]:
            return None, row.drafted, row.accepted
        return row.segment, row.drafted_per_position[0], row.accepted_per_position[0]
    is_comparable = level is None or level.k in (None, row.num_speculative_tokens)
    return row.segment if is_comparable else None, _asked_for(stream, row), row.accepted


def _asked_for(stream: Stream, row: StoredRecord) -> int:
    """Draft tokens. How many a lookup drafts depends on what it finds, so that all that K allows
    count: as in `acceptance_levels.levels`."""
    if stream.method in LOOKED_UP and row.num_speculative_tokens is not None:
        return row.steps * row.num_speculative_tokens
    return row.drafted


def _watched(session: Session) -> set[tuple[str, str, str]]:
    """The drafts under watch. Read once per batch, which has many streams, hardly any of them watched."""
    if _WATCHED not in session.info:
        session.info[_WATCHED] = folding.watched_versions(session)
    found: set[tuple[str, str, str]] = session.info[_WATCHED]
    return found


def _recovery(session: Session, stream: Stream, run: RetrainRun, state: Watch) -> str:
    """For example: draft v2 promoted: acceptance of german recovered to 0.71 from 0.41, was 0.77: 8% below,
    over 180 requests."""
    incident = None
    if (
        run.incident_id is not None and stream.method not in LOOKED_UP
    ):  # whose levels are not those of the incident
        incident = incidents.find(session, run.incident_id)[0]
    return f"draft {run.candidate_version} promoted: {recovery.told(state, incident)}"


def _resolve(session: Session, run: RetrainRun, reason: str, at: datetime) -> None:
    draft = drafts.find(session, run.server, run.target, run.candidate_version or "")
    promoted_at = draft.promoted_at if draft is not None else None
    incident_notes.resolve(session, run.incident_id, reason, at, promoted_at)


def _stands(session: Session, stream: Stream, run: RetrainRun, state: Watch, at: datetime) -> None:
    told = watch.describe(state, retrain_runs.numbers_of(run).gate)
    reason = f"{run.reason}; live: {told}"
    retrain_runs.end(session, run.id, "promoted", reason, retrain_runs.now(session))
    if state.recovered:
        _resolve(session, run, f"{_recovery(session, stream, run, state)}; this is its level from now on", at)
    else:
        reason = (
            f"draft {run.candidate_version} stays in service, but {state.requests} requests do not show that "
            f"it accepts more than the old one: {told}"
        )
        incident_notes.end_mitigation(session, run.incident_id, reason, at)
