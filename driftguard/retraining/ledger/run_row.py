"""What every step of one retraining needs, and the row that stores its progress."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import structlog

from driftguard.errors import DatabaseUnavailable
from driftguard.records.documents.retraining_run import RunNumbers, TrainingCurve
from driftguard.retraining.engines.connect import Engine
from driftguard.retraining.engines.engine_admin import EngineInfo
from driftguard.retraining.ledger import incident_notes
from driftguard.retraining.ledger.outcome import Progress, RetrainOutcome, Stage, Trigger
from driftguard.retraining.ledger.training_curve import with_report
from driftguard.settings import Settings
from driftguard.store import retrain_runs
from driftguard.store.database import Database
from driftguard.store.tables import RetrainRun

_PROGRESS_SECONDS = 1.0  # shortest time between two stored reports
_TOLD = ("step", "steps", "loss", "acceptance")
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Job:
    """One retraining of the draft that `info` says is in service."""

    database: Database
    settings: Settings
    engine: Engine
    info: EngineInfo
    trigger: Trigger
    on_progress: Callable[[Progress], None]
    should_stop: Callable[[], bool]


def new_run(job: Job, incident_id: UUID | None, state: retrain_runs.RunState) -> RetrainRun:
    """A row that is not stored yet."""
    with job.database.session() as session:
        now = retrain_runs.now(session)
    return RetrainRun(
        id=uuid4(),
        server=job.info.server,
        target=job.info.target,
        incident_id=incident_id,
        trigger=job.trigger,
        state=state,
        reason=None,
        started_at=now,
        ended_at=None,
        parent_version=job.info.draft.version,
        candidate_version=None,
        progress=None,
        numbers=None,
    )


def begin(job: Job, incident_id: UUID | None, requests: int) -> UUID:
    """Stores the run and marks its incident as mitigating."""
    run = new_run(job, incident_id, "collecting")
    with job.database.session() as session:
        retrain_runs.begin(session, run)
        reason = f"retraining on {requests} captured requests (run {run.id})"
        incident_notes.begin_mitigation(session, incident_id, reason, run.started_at)
    log.info("retraining began", run=str(run.id), server=run.server, target=run.target, requests=requests)
    return run.id


def advance(job: Job, run_id: UUID, stage: Stage, detail: str) -> None:
    with job.database.session() as session:
        retrain_runs.advance(session, run_id, stage)
    log.info("retraining", run=str(run_id), stage=stage, detail=detail)
    job.on_progress(Progress(stage, detail))


def end(
    job: Job,
    run_id: UUID,
    incident_id: UUID | None,
    state: retrain_runs.Failure,
    reason: str,
    numbers: RunNumbers | None = None,
    *,
    was_stopped: bool = False,
) -> RetrainOutcome:
    """Ends the run without a promotion: its incident gets its earlier state back. Where the lock was lost
    another process may have ended it already, and may be retraining for the incident."""
    with job.database.session() as session:
        if retrain_runs.ended_ids(session, [run_id]):
            return RetrainOutcome(state, reason, numbers, run_id)
        now = retrain_runs.now(session)
        if was_stopped:
            retrain_runs.change_numbers(session, run_id, was_stopped=True)
        retrain_runs.end(session, run_id, state, reason, now)
        incident_notes.end_mitigation(session, incident_id, f"retraining {state}: {reason}", now)
    log.warning("retraining ended", run=str(run_id), state=state, reason=reason)
    return RetrainOutcome(state, reason, numbers, run_id)


class ProgressWriter:
    """Passes each report of the training on, and stores the newest one and the curve at most once per second,
    and when the `with` block is left, however it is left. What cannot be stored ends no training."""

    def __init__(self, job: Job, run_id: UUID) -> None:
        self._job = job
        self._run_id = run_id
        self._curve = TrainingCurve()
        self._newest: dict[str, Any] | None = None
        self._stored_at = float("-inf")

    def __enter__(self) -> ProgressWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self._store()

    def __call__(self, event: dict[str, Any]) -> None:
        before, self._curve = self._curve, with_report(self._curve, event, datetime.now(UTC))
        if self._curve.left_out > before.left_out:
            if not before.left_out:
                reason = self._curve.left_out_reason
                log.warning("a report of the training is left out", run=str(self._run_id), reason=reason)
        elif event["event"] == "progress":
            step, steps, loss, acceptance = (event[name] for name in _TOLD)
            self._newest = {name: event[name] for name in _TOLD}
            self._job.on_progress(
                Progress("training", f"step {step} of {steps}", step, steps, loss, acceptance)
            )
        if time.monotonic() - self._stored_at >= _PROGRESS_SECONDS:
            self._store()

    def _store(self) -> None:
        try:
            with self._job.database.session() as session:
                retrain_runs.set_progress(session, self._run_id, self._newest, self._curve)
        except DatabaseUnavailable as error:
            log.warning("the progress of a training waits for the database", error=error.detail)
        self._stored_at = time.monotonic()
