"""One attempt: collect, distil or make a corpus, evaluate, gate, promote. However it ends, its row states
the reason."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import msgspec
import structlog
from sqlalchemy.exc import SQLAlchemyError

from driftguard.errors import Conflict, DriftGuardError
from driftguard.records.documents.retraining_run import Decision, GateRules, RequestCounts, RunNumbers
from driftguard.retraining.engines.candidate_kind import CandidateKind
from driftguard.retraining.engines.engine_admin import EngineAdmin, EngineAway, EngineInfo, EngineRefused
from driftguard.retraining.ledger.outcome import Progress, RetrainOutcome
from driftguard.retraining.ledger.run_row import Job, ProgressWriter, advance, begin, end
from driftguard.retraining.promotion import restart
from driftguard.retraining.promotion.reconcile import settle_locked
from driftguard.retraining.training import checksums, workspace
from driftguard.retraining.training.evaluation import read_measurements, told_of_answers
from driftguard.retraining.training.gate import GroupScores, decide
from driftguard.retraining.training.plan import MINIMUM_HELD_OUT, Plan, is_changed
from driftguard.retraining.training.process import (
    CorporaEvaluation,
    CorpusOrder,
    Distillation,
    Evaluation,
    HybridEvaluation,
    TrainingFailed,
    TrainingStopped,
    distil,
    evaluate,
    evaluate_corpora,
    evaluate_hybrid,
    make_corpus,
)
from driftguard.retraining.training.target_files import TargetFiles
from driftguard.retraining.training.traffic import Traffic, write_requests
from driftguard.retraining.training.workspace import Workspace
from driftguard.retraining.trigger import Call
from driftguard.store import acceptance_levels, drafts, retrain_runs
from driftguard.store.acceptance_levels import Sampling
from driftguard.store.retrain_runs import RunLock

AWAY_SECONDS: Final = 600.0  # for which an engine may be away when its new draft is ready
_LOOK_SECONDS: Final = 1.0
LOCK_LOOK_SECONDS: Final = 5.0
_LOCK_LOST: Final = (
    "the training was ended, because the lock of this retraining was lost with its connection to the database"
)
_LOOK_BACK = timedelta(days=7)  # records from which the sampling temperature is read
log = structlog.get_logger(__name__)


def attempt(
    job: Job, kind: CandidateKind, lock: RunLock, call: Call, traffic: Traffic, planned: Plan
) -> RetrainOutcome:
    """Ends promoted, rolling_out, rejected or failed.

    Raises DatabaseUnavailable where the outcome cannot be stored.
    """
    watched = _WatchedLock(lock)
    asked_to_stop = job.should_stop
    job = replace(job, should_stop=lambda: asked_to_stop() or watched.is_lost())
    run_id = begin(job, call.incident_id, len(planned.train))
    files = workspace.of_run(job.settings.data_directory, run_id)
    try:
        workspace.create(files)
        where = job.info.target_directory
        target = TargetFiles.now(job.info.target, None if where is None else Path(where))
        version, decision, numbers = _make_and_judge(job, kind, run_id, files, call, traffic, planned)
        target.check()
        if not decision.promote:
            return end(job, run_id, call.incident_id, "rejected", decision.reason, numbers)
        lock.check()
        directory = workspace.draft_directory(job.settings.data_directory, version)
        checksums.verify(directory, numbers.checksums_sha256)
        if isinstance(job.engine, EngineAdmin):
            _load(job, job.engine, run_id, version, target)
            lock.check()  # a load takes minutes, and without the lock another process has settled this run
        else:
            _check_same_serves(job.info, job.engine.info_beside(job.info))
            target.check()
    except _RolledBackBefore as error:
        return end(job, run_id, call.incident_id, "rejected", error.detail)
    except TrainingStopped as error:
        if watched.is_lost():
            return end(job, run_id, call.incident_id, "failed", _LOCK_LOST)
        return end(job, run_id, call.incident_id, "failed", error.detail, was_stopped=True)
    except (DriftGuardError, SQLAlchemyError, OSError) as error:
        told = _first_line(error)
        if isinstance(error, OSError) and error.filename is None:  # as of a write to a full disk
            told = f"{told}, in {job.settings.data_directory}"
        return end(job, run_id, call.incident_id, "failed", told)
    finally:
        workspace.remove(files)
    if isinstance(job.engine, EngineAdmin):
        return _activate(job, job.engine, run_id, call, version, decision, numbers)
    return restart.promote(job, job.engine, run_id, call.incident_id, version)


class _WatchedLock:
    """The lock of a training of hours, looked at now and then: what is trained without it cannot be
    promoted."""

    def __init__(self, lock: RunLock) -> None:
        self._lock = lock
        self._is_lost = False
        self._looked_at = time.monotonic()

    def is_lost(self) -> bool:
        if not self._is_lost and time.monotonic() - self._looked_at >= LOCK_LOOK_SECONDS:
            self._is_lost = self._lock.is_lost()
            self._looked_at = time.monotonic()
        return self._is_lost


class _RolledBackBefore(DriftGuardError):
    """The same captured requests made the same weights again."""


def _make_and_judge(
    job: Job, kind: CandidateKind, run_id: UUID, files: Workspace, call: Call, traffic: Traffic, planned: Plan
) -> tuple[str, Decision, RunNumbers]:
    """The candidate's version, the gate's decision, and the numbers behind it."""
    counts = _collect(job, files, traffic, planned)
    version = _make(job, kind, run_id, files, has_replay=counts.replay > 0)
    directory = workspace.draft_directory(job.settings.data_directory, version)
    _store_candidate(job, run_id, call, version, directory)
    workspace.keep_candidate(files, directory)
    made = checksums.digest_of_list(directory)
    advance(job, run_id, "evaluating", f"scoring on {counts.held_out} held-out requests")
    checksums.verify(directory, made)  # so that the files scored are those that were made and that will serve
    measured = _measured(job, kind, files, directory)
    groups, costs = read_measurements(measured)
    _check_judged(run_id, groups, measured.get("left_out", {}))
    rules = job.settings.retraining
    gate_rules = GateRules(rules.minimum_gain, rules.maximum_regression)
    decision = decide(groups, costs, gate_rules, of_asked=kind != "model")
    if planned.left_out is not None:
        decision = replace(decision, reason=f"{decision.reason}; {planned.left_out.told}")
    if (told := told_of_answers(measured)) is not None:
        log.warning("the captured answers are not those of this target", run=str(run_id), reason=told)
        decision = replace(decision, reason=f"{decision.reason}; {told}")
    numbers = RunNumbers(
        checksums_sha256=made,
        requests=counts,
        temperature=measured.get("temperature"),
        costs=costs,
        measured_seconds_per_draft_token=tuple(
            draft["seconds_per_draft_token"] for draft in measured["drafts"]
        ),
        gate=decision,
    )
    _store_decision(job, run_id, version, decision, numbers)
    return version, decision, numbers


def _collect(job: Job, files: Workspace, traffic: Traffic, planned: Plan) -> RequestCounts:
    job.on_progress(Progress("collecting", f"{len(planned.train)} requests for training"))
    parts = (
        (files.train, planned.train),
        (files.replay, planned.replay),
        (files.held_out, planned.held_out),
    )
    written = [write_requests(path, traffic.read(keys), planned.groups) for path, keys in parts]
    _check_left(job, planned, written[0], written[2])
    counts = RequestCounts(*(part.total() for part in written))
    if planned.left_out is None:
        return counts
    left_out, vocabulary = planned.left_out.requests, planned.left_out.vocabulary
    log.warning(
        "captured requests with token ids that the target lacks are left out",
        server=job.info.server,
        requests=left_out,
        vocabulary=vocabulary,
    )
    return replace(counts, out_of_vocabulary=left_out)


def _check_left(job: Job, planned: Plan, train: Counter[str], held_out: Counter[str]) -> None:
    """Raises TrainingFailed where so many captured requests were deleted since the plan that it would not
    have been made."""
    held = sum(map(is_changed, held_out.elements()))
    wanted_held = sum(is_changed(planned.groups[key]) for key in planned.held_out)
    left, wanted = train.total() + held, len(planned.train) + wanted_held
    if held < min(MINIMUM_HELD_OUT, wanted_held) or left < min(
        job.settings.retraining.minimum_requests, wanted
    ):
        raise TrainingFailed(
            f"captured requests were deleted meanwhile: {left} of {wanted} of the changed traffic are left, "
            f"{held} of {wanted_held} of those held out for the gate"
        )


def _make(job: Job, kind: CandidateKind, run_id: UUID, files: Workspace, *, has_replay: bool) -> str:
    """The candidate's version."""
    rules = job.settings.retraining
    if kind != "model":
        advance(job, run_id, "training", "a corpus of captured answers")
        corpus = CorpusOrder(
            target=_directory(job.info.target_directory, "target"),
            train=files.train,
            replay=files.replay if has_replay else None,
            output=files.candidate,
            most_tokens=rules.corpus_tokens,
            as_texts=kind == "corpus_as_texts",
        )
        return make_corpus(corpus, files.log, job.should_stop)
    advance(job, run_id, "training", f"{rules.steps} steps from draft {job.info.draft.version}")
    order = Distillation(
        target=_directory(job.info.target_directory, "target"),
        draft=_directory(job.info.draft.directory, "draft in service"),
        train=files.train,
        replay=files.replay if has_replay else None,
        held_out=files.held_out,
        output=files.candidate,
        steps=rules.steps,
        seed=rules.seed,
        threads=rules.threads,
    )
    with ProgressWriter(job, run_id) as writer:
        return distil(order, files.log, writer, job.should_stop)


def _store_candidate(job: Job, run_id: UUID, call: Call, version: str, directory: Path) -> None:
    if version == job.info.draft.version:
        raise TrainingFailed(f"the training changed nothing: the candidate equals draft {version}")
    with job.database.session() as session:
        known = drafts.find(session, job.info.server, job.info.target, version)
        if known is not None and known.state == "rolled_back" and not call.is_forced:
            raise _RolledBackBefore(
                f"the training made draft {version} again, which was rolled back; capture more, or --force "
                "promotes it where it passes the gate"
            )
        drafts.add_candidate(
            session,
            server=job.info.server,
            target=job.info.target,
            version=version,
            method=job.info.draft.method,
            directory=str(directory),
            parent_version=job.info.draft.version,
            run_id=run_id,
            at=retrain_runs.now(session),
        )


def _measured(job: Job, kind: CandidateKind, files: Workspace, candidate: Path) -> dict[str, Any]:
    if kind == "model":
        return evaluate(_evaluation(job, files, candidate), files.log, job.should_stop)
    if job.info.draft.method == "hybrid":
        return evaluate_hybrid(_hybrid_evaluation(job, files, candidate), files.log, job.should_stop)
    serving = job.info.draft.directory
    if serving is None and _was_made_here(job):
        raise TrainingFailed(f"the files of corpus {job.info.draft.version}, in service, are gone")
    order = CorporaEvaluation(
        target=_directory(job.info.target_directory, "target"),
        corpora=(None if serving is None else _directory(serving, "corpus in service"), candidate),
        traffic=files.held_out,
        num_speculative_tokens=job.info.num_speculative_tokens,
        single_tokens=kind == "corpus_as_texts",
        ngram_tokens=job.info.ngram_tokens if job.info.draft.method == "ngram" else None,
        threads=job.settings.retraining.threads,
    )
    return evaluate_corpora(order, files.log, job.should_stop)


def _check_judged(run_id: UUID, groups: Sequence[GroupScores], left_out: Mapping[str, int]) -> None:
    """left_out: held-out requests by group that are longer than the models' context, so that no draft was
    scored on them. Raises TrainingFailed where the changed traffic has no other ones: the gate needs one."""
    if left_out:
        log.warning(
            "held-out requests are longer than the models' context and are left out",
            run=str(run_id),
            requests=left_out,
        )
    if not any(group.changed for group in groups):
        told = ", ".join(f"{count} of {group}" for group, count in left_out.items()) or "none"
        raise TrainingFailed(
            "there is no held-out request of the changed traffic to judge the candidate by; left out because "
            f"they are longer than the models' context: {told}"
        )


def _hybrid_evaluation(job: Job, files: Workspace, candidate: Path) -> HybridEvaluation:
    sampling = _sampling(job)
    return HybridEvaluation(
        target=_directory(job.info.target_directory, "target"),
        draft=_directory(job.info.draft.directory, "model of the hybrid in service"),
        corpora=(_directory(job.info.draft.corpus, "corpus in service"), candidate),
        traffic=files.held_out,
        least_match=job.info.suffix_min_match,
        num_speculative_tokens=job.info.num_speculative_tokens,
        temperature=sampling.temperature,
        verification=sampling.verification,
        threads=job.settings.retraining.threads,
    )


def _was_made_here(job: Job) -> bool:
    with job.database.session() as session:
        known = drafts.find(session, job.info.server, job.info.target, job.info.draft.version)
        return known is not None and known.retrain_run_id is not None


def _evaluation(job: Job, files: Workspace, candidate: Path) -> Evaluation:
    sampling = _sampling(job)
    return Evaluation(
        target=_directory(job.info.target_directory, "target"),
        drafts=(_directory(job.info.draft.directory, "draft in service"), candidate),
        traffic=files.held_out,
        num_speculative_tokens=job.info.num_speculative_tokens,
        temperature=sampling.temperature,
        acceptance_rule=_acceptance_rule(job),
        verification=sampling.verification,
        threads=job.settings.retraining.threads,
    )


def _acceptance_rule(job: Job) -> str:
    """Where the settings do not tell it, drafts are taken to be sampled, as the built-in engine does; so they
    are for typical acceptance, for which there is no model here."""
    known = {engine.server: engine.acceptance_rule for engine in job.settings.engines}
    return "match" if known.get(job.info.server) == "match" else "rejection"


def _sampling(job: Job) -> Sampling:
    with job.database.session() as session:
        sampling = acceptance_levels.usual_sampling(
            session,
            server=job.info.server,
            target=job.info.target,
            version=job.info.draft.version,
            oldest=datetime.now(UTC) - _LOOK_BACK,
        )
    if sampling is None:
        log.warning("no record tells the sampling temperature; the drafts are compared at 1.0")
        return Sampling(1.0, "token")
    return sampling


def _store_decision(job: Job, run_id: UUID, version: str, decision: Decision, numbers: RunNumbers) -> None:
    """Stored before the engine loads the candidate, so that a killed run can be settled."""
    with job.database.session() as session:
        retrain_runs.advance(session, run_id, "evaluating", candidate_version=version, numbers=numbers)
        if not decision.promote:
            drafts.reject(session, job.info.server, job.info.target, version, retrain_runs.now(session))


def _check_same_serves(made_for: EngineInfo, now: EngineInfo) -> None:
    """Raises Conflict where the engine serves something else by now than what the candidate was made for and
    judged against: a training takes minutes to hours."""
    if (now.target, now.target_directory) != (made_for.target, made_for.target_directory):
        raise Conflict(
            f"{made_for.server} serves target {now.target} at {now.target_directory} now, not "
            f"{made_for.target} at {made_for.target_directory}, for which the candidate was made"
        )
    if now.draft.version != made_for.draft.version:
        raise Conflict(
            f"draft {now.draft.version} is in service on {made_for.server} now, not "
            f"{made_for.draft.version}, against which the candidate was judged"
        )


def _load(job: Job, admin: EngineAdmin, run_id: UUID, version: str, target: TargetFiles) -> None:
    """Waits for an engine that is started again meanwhile: else the training would be in vain."""
    advance(job, run_id, "promoting", f"loading draft {version}")
    deadline = time.monotonic() + AWAY_SECONDS
    has_told = False
    while True:
        try:
            return _load_now(job, admin, version, target)
        except EngineAway as error:
            if time.monotonic() >= deadline or job.should_stop():
                raise
            if not has_told:
                log.info("waiting for the engine, to load a draft", run=str(run_id), reason=error.detail)
                has_told = True
        time.sleep(_LOOK_SECONDS)


def _load_now(job: Job, admin: EngineAdmin, version: str, target: TargetFiles) -> None:
    try:
        serving = admin.info()
    except EngineRefused as error:  # also where something before the engine answers for it
        raise EngineAway(error.detail) from error
    _check_same_serves(job.info, serving)
    target.check()
    directory = workspace.draft_directory(job.settings.data_directory, version)
    loaded = admin.load(directory, version)
    if loaded.version != version:
        raise EngineRefused(f"the engine loaded {directory} as version {loaded.version}, not {version}")


def _activate(
    job: Job,
    admin: EngineAdmin,
    run_id: UUID,
    call: Call,
    version: str,
    decision: Decision,
    numbers: RunNumbers,
) -> RetrainOutcome:
    try:
        serving = admin.activate(version)
    except EngineRefused as error:
        log.warning("activation not confirmed; asking the engine", run=str(run_id), error=error.detail)
        try:
            serving = admin.info().draft  # the answer may be lost although the engine acted
        except EngineRefused:
            reason = f"{error.detail}; the next run asks which draft is in service"
            return RetrainOutcome("failed", reason, numbers, run_id)
        if serving.version != version:
            return end(job, run_id, call.incident_id, "failed", error.detail, numbers)
    settle_locked(job.database, job.settings, admin, msgspec.structs.replace(job.info, draft=serving))
    log.info("draft promoted", run=str(run_id), version=version, reason=decision.reason)
    return RetrainOutcome("promoted", f"draft {version}: {decision.reason}", numbers, run_id)


def _directory(directory: str | None, what: str) -> Path:
    if directory is None or not Path(directory).is_dir():
        raise TrainingFailed(
            f"the {what} is in {directory}, which is no directory on this machine; training needs the "
            "engine's model directories here, at the same paths"
        )
    return Path(directory)


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
