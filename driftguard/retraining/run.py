"""One retraining, from captured traffic to a promoted draft: the nightly job and the incident's job alike.

    ask the engine what it serves -> settle what a killed run left -> is there something to do?
    -> collect -> distil -> evaluate on held-out traffic -> gate -> load and activate -> watch (see watch.py)

Where the engine has no admin API a restart takes the place of load and activate (see restart.py). Whatever
happens before the engine activates the candidate, or its restart is asked for, leaves the draft in service as
it was.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final
from uuid import UUID

import structlog

from driftguard.errors import Conflict
from driftguard.retraining.attempt import attempt
from driftguard.retraining.engines.candidate_kind import candidate_kind
from driftguard.retraining.engines.connect import Engine, connect
from driftguard.retraining.engines.engine_admin import (
    EngineDraft,
    EngineInfo,
    EngineRefused,
    engine_of,
)
from driftguard.retraining.ledger.outcome import Progress, RetrainOutcome, Trigger
from driftguard.retraining.ledger.run_row import Job, new_run
from driftguard.retraining.promotion import restart
from driftguard.retraining.promotion.reconcile import end_killed, settle, settle_locked
from driftguard.retraining.training.draft_files import context_of, vocabulary_of
from driftguard.retraining.training.plan import (
    Change,
    LeftOut,
    NothingToDo,
    Plan,
    PlanRules,
    plan,
    too_few,
)
from driftguard.retraining.training.traffic import Traffic, captured_traffic, traffic_of_file
from driftguard.retraining.trigger import what_calls_for_it
from driftguard.settings import Settings
from driftguard.store import captures, drafts, retrain_runs
from driftguard.store.database import Database
from driftguard.store.retrain_runs import RunLock

_LOOK_SECONDS: Final = 1.0  # between two queries for records of a draft that is rolled out
SETTLING_SECONDS: Final = 30.0  # for which a retraining waits for whatever runs on the same server
log = structlog.get_logger(__name__)


def retrain(
    database: Database,
    settings: Settings,
    *,
    server: str | None = None,
    trigger: Trigger = "manual",
    incident_id: UUID | None = None,
    force: bool = False,
    traffic: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    awaits_restart: bool = False,
    stores_why_not: bool = False,
) -> RetrainOutcome:
    """Retrains the draft of one engine once, and says how it ended.

    `server` may be left out when the settings name one engine. `force` retrains although no incident calls
    for it, then on all captured traffic, and waits for no more traffic than the minimum. `traffic`, a JSON
    Lines file of token ids, forces too, and is then the only source, for training and for the gate.
    `should_stop` is called a few times per second while the training process runs; a stopped run ends as
    failed. Where a restart promotes, it ends rolling_out as soon as the restart is ordered; with
    `awaits_restart` it waits until records show whether that succeeded. `stores_why_not`: also that another
    process holds the server, for a person who finds the answer among the runs alone.

    Raises BadSettings (no such engine), BadInput (the traffic file), NotFound (the incident),
    DatabaseUnavailable.
    """
    name = engine_of(settings, server).server
    from_file = traffic_of_file(traffic) if traffic else None
    engine = connect(database, settings, name, should_stop)

    def job(info: EngineInfo) -> Job:
        return Job(database, settings, engine, info, trigger, on_progress, should_stop)

    try:
        # What an incident calls for is asked again by itself.
        wait_seconds = 0.0 if trigger == "incident" else SETTLING_SECONDS
        with _free(database, engine, name, wait_seconds, should_stop) as (lock, info):
            if lock is None:
                runs = NothingToDo(_what_runs(database, info))
                if stores_why_not and not should_stop():
                    return _nothing_to_do(job(info), incident_id, runs)
                return RetrainOutcome("nothing_to_do", runs.reason)
            info = settle_locked(database, settings, engine, info)
            outcome = _retrain(job(info), lock, incident_id, force=force, from_file=from_file)
    except EngineRefused as error:
        end_killed(database, settings, name)
        return _failed(job(_last_known(database, name)), incident_id, error.detail)
    if outcome.state == "rolling_out" and awaits_restart:
        return _await_restart(database, settings, name, outcome, should_stop)
    return outcome


@contextmanager
def _free(
    database: Database, engine: Engine, name: str, wait_seconds: float, should_stop: Callable[[], bool]
) -> Iterator[tuple[RunLock | None, EngineInfo]]:
    """The lock of what the engine serves, None where it is held for longer: a settling, which may change the
    draft that serves, holds it for seconds."""
    deadline = time.monotonic() + wait_seconds
    has_told = False
    while True:
        info = engine.info()
        with retrain_runs.try_lock(database, info.server, info.target) as lock:
            if lock is not None:
                yield lock, engine.info()  # who held it may have changed what serves
                return
            if time.monotonic() >= deadline or should_stop():
                yield None, info
                return
        if not has_told:
            log.info("waiting for what runs on the same server", server=name, seconds=wait_seconds)
            has_told = True
        time.sleep(min(_LOOK_SECONDS, wait_seconds))


def _what_runs(database: Database, info: EngineInfo) -> str:
    pair = f"{info.server} / {info.target}"
    with database.session() as session:
        found = retrain_runs.in_states(session, info.server, info.target, retrain_runs.LOCKED_STATES)
    if not found:
        return (
            f"a retraining of {pair} is running already, or an earlier one is settled; try again in a minute"
        )
    run = found[-1]
    return (
        f"a retraining of {pair} is running already: {run.state}, since {run.started_at:%Y-%m-%d %H:%M} UTC; "
        f"follow it with: driftguard runs show {run.id}"
    )


def _await_restart(
    database: Database,
    settings: Settings,
    server: str,
    rolling: RetrainOutcome,
    should_stop: Callable[[], bool],
) -> RetrainOutcome:
    """Settles the run as soon as possible, unless another process does it first."""
    while not should_stop():
        with database.session() as session:
            run = retrain_runs.find(session, rolling.run_id) if rolling.run_id else None
            if run is None or run.state not in retrain_runs.ROLLING_STATES:
                break
            is_due = restart.is_due(session, run)
        if is_due:
            try:
                settle(database, settings, server, should_stop)
            except (Conflict, EngineRefused) as error:
                log.info("cannot settle yet", server=server, reason=error.detail)
        time.sleep(_LOOK_SECONDS)
    else:
        return RetrainOutcome("failed", f"stopped while {rolling.reason}", None, rolling.run_id)
    if run is None or run.state not in ("watching", "promoted"):
        return RetrainOutcome("failed", (run and run.reason) or "the run is gone", None, rolling.run_id)
    return RetrainOutcome(
        "promoted", f"draft {run.candidate_version}: {run.reason}", run.numbers, rolling.run_id
    )


def _retrain(
    job: Job, lock: RunLock, incident_id: UUID | None, *, force: bool, from_file: Traffic | None
) -> RetrainOutcome:
    kind = candidate_kind(job.settings, job.info)
    if kind is None:
        return _nothing_to_do(job, incident_id, NothingToDo(_nothing_to_make(job)))
    with job.database.session() as session:
        if (under_way := restart.under_way(session, job.info)) is not None:
            return _nothing_to_do(job, incident_id, NothingToDo(under_way))
        call = what_calls_for_it(
            session,
            job.info,
            incident_id,
            forced=force or from_file is not None,
            least=job.settings.diagnosis.least_confidence,
        )
    if isinstance(call, NothingToDo):
        return _nothing_to_do(job, incident_id, call)
    change = None if from_file else call.change
    rules = _plan_rules(job.settings)
    if kind == "model":
        rules = replace(rules, context_tokens=context_of(job.info.target_directory, job.info.draft.directory))
    else:
        rules = replace(rules, corpus_tokens=job.settings.retraining.corpus_tokens)
    if force or kind != "model":  # of few answers a corpus drafts less, and never worse
        rules = replace(rules, aim_requests=rules.minimum_requests)
    nothing = None if change is None else _too_few(job, change, rules)
    if nothing is None:
        traffic = from_file or captured_traffic(job.database, job.info.server, job.info.target)
        planned = _planned(traffic, change, rules, vocabulary_of(job.info.target_directory))
        if isinstance(planned, Plan):
            return attempt(job, kind, lock, call, traffic, planned)
        nothing = planned
    if from_file is None and not job.settings.capture.enabled:
        nothing = replace(nothing, reason=f"{nothing.reason}, and capture is off (capture.enabled)")
    return _nothing_to_do(job, call.incident_id, nothing)


def _too_few(job: Job, change: Change, rules: PlanRules) -> NothingToDo | None:
    """Asked first, because the rest reads all token ids: an incident that waits for traffic asks every
    minute."""
    with job.database.session() as session:
        found = captures.count_since(session, job.info.server, job.info.target, change.since)
    return too_few(found, change, rules)


def _planned(
    traffic: Traffic, change: Change | None, rules: PlanRules, vocabulary: int | None
) -> Plan | NothingToDo:
    """Without the requests that have tokens which the target lacks: by a client's mistake, or because one
    with more tokens had its name before."""
    now = datetime.now(UTC)
    planned = plan(traffic.requests, change, rules, now)
    if isinstance(planned, NothingToDo) or vocabulary is None:
        return planned
    beyond = traffic.beyond(vocabulary)  # last, because it reads all tokens
    if not beyond:
        return planned
    left_out = LeftOut(len(beyond), vocabulary)
    planned = plan((one for one in traffic.requests if one.key not in beyond), change, rules, now)
    if isinstance(planned, NothingToDo):
        return replace(planned, reason=f"{planned.reason}; {left_out.told}")
    return replace(planned, left_out=left_out)


def _nothing_to_make(job: Job) -> str:
    draft = job.info.draft
    told = f"the draft in service, {draft.name}, has method {draft.method}"
    if engine_of(job.settings, job.info.server).update_engine == "sglang_ngram":
        return f"{told}, and a corpus is for ngram: its records must have that method (proxy --method ngram)"
    if draft.method == "hybrid":
        return (
            f"{told}, and no corpus: of a hybrid that is what is made anew, the model stays. A first one is "
            "put into service by POST /admin/drafts of the engine, or by --corpus"
        )
    return (
        f"{told}: nothing can be made in its place. draft_model is trained for any server, eagle3, medusa, "
        "ssd and mirror for the built-in engine alone; a corpus is made for the built-in engine's ngram, "
        "suffix and hybrid, and for an SGLang's ngram"
    )


def _plan_rules(settings: Settings) -> PlanRules:
    rules = settings.retraining
    return PlanRules(
        minimum_requests=rules.minimum_requests,
        aim_requests=rules.aim_requests,
        wait=timedelta(seconds=rules.wait_seconds),
        heldout_fraction=rules.heldout_fraction,
    )


def _nothing_to_do(job: Job, incident_id: UUID | None, nothing: NothingToDo) -> RetrainOutcome:
    run = new_run(job, incident_id, "nothing_to_do")
    run.reason, run.ended_at = nothing.reason, run.started_at
    with job.database.session() as session:
        run_id = retrain_runs.store_nothing_to_do(session, run)
    log.info("nothing to retrain", server=run.server, target=run.target, reason=nothing.reason)
    return RetrainOutcome(
        "nothing_to_do", nothing.reason, None, run_id, waits_for_traffic=nothing.waits_for_traffic
    )


def _failed(job: Job, incident_id: UUID | None, reason: str) -> RetrainOutcome:
    """A run that failed before it began: nothing was changed."""
    run = new_run(job, incident_id, "failed")
    run.reason, run.ended_at, run.parent_version = reason, run.started_at, None
    with job.database.session() as session:
        retrain_runs.begin(session, run)
    log.error("retraining failed", server=run.server, target=run.target, reason=reason)
    return RetrainOutcome("failed", reason, None, run.id)


def _last_known(database: Database, server: str) -> EngineInfo:
    """What an engine that does not answer served last, for the row of the failed run."""
    with database.session() as session:
        known = drafts.in_service_of_server(session, server)
    unknown = EngineDraft("unknown", "unknown", "none")
    if known is None:
        return EngineInfo(server, "unknown", None, unknown, 0)
    draft = EngineDraft(known.name, known.version, known.method, known.directory)
    return EngineInfo(server, known.target, None, draft, 0)
