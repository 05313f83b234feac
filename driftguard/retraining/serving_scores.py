"""Scores the captured requests of an incident with the registered target and draft, in a process of its own:
what would an engine that serves both faithfully have accepted? The diagnosis compares that with what was."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final
from uuid import UUID

import structlog

from driftguard.diagnosis.captured_requests import MINIMUM_SAMPLE
from driftguard.diagnosis.serving_gap import ScoredRequest, summarised
from driftguard.errors import BadSettings, DriftGuardError
from driftguard.records.documents.incident import names_of
from driftguard.records.documents.serving_scores import MissingScores, Rule, ServingScores
from driftguard.retraining.due import captures_to_score
from driftguard.retraining.engines.candidate_kind import is_trained_here, torch_version
from driftguard.retraining.engines.connect import connect
from driftguard.retraining.engines.engine_admin import EngineInfo, EngineRefused, engine_of
from driftguard.retraining.training import process, workspace
from driftguard.retraining.training.draft_files import is_here
from driftguard.retraining.training.process import Scoring, TrainingFailed, TrainingStopped
from driftguard.retraining.training.traffic import write_served
from driftguard.settings import Settings
from driftguard.store import drafts, incidents, serving_scores
from driftguard.store.database import Database
from driftguard.store.serving_scores import ServedCapture
from driftguard.store.tables import Incident, Stream

ENDING: Final = timedelta(minutes=2)  # after its deadline a scoring that has not ended was killed
log = structlog.get_logger(__name__)


class NotScored(DriftGuardError):
    """The captured requests cannot be scored; `missing` says why as a code, the message in words."""

    def __init__(self, missing: MissingScores, detail: str) -> None:
        super().__init__(detail)
        self.missing: MissingScores = missing


def score(database: Database, settings: Settings, incident_id: UUID, should_stop: Callable[[], bool]) -> str:
    """Stores the scores, or the reason why there are none; returns what became of it, in a few words.

    Raises DatabaseUnavailable, NotFound (the incident).
    """
    with database.session() as session:
        incident, stream = incidents.find(session, incident_id)
        step = captures_to_score(incident)
        if not step or not serving_scores.begin(session, incident_id, step, datetime.now(UTC)):
            return "not due"
    try:
        scores = _scores(database, settings, incident, stream, should_stop)
    except TrainingStopped:
        with database.session() as session:
            serving_scores.take_back(session, incident_id)
        return "stopped"
    except NotScored as reason:
        log.warning("not scored", incident=str(incident_id), code=reason.missing, reason=reason.detail)
        with database.session() as session:
            serving_scores.end(session, incident_id, datetime.now(UTC), missing=reason.missing)
        return reason.detail
    with database.session() as session:
        serving_scores.end(session, incident_id, datetime.now(UTC), scores=scores)
    return "scored"


def give_up_killed(database: Database, settings: Settings) -> None:
    """Scorings that a killed sidecar left, and the requests that it wrote for them."""
    now = datetime.now(UTC)
    longest = timedelta(seconds=settings.diagnosis.score_seconds) + ENDING
    with database.session() as session:
        serving_scores.give_up(session, now - longest, now)
    workspace.remove_old_scorings(settings.data_directory, longest)


def _scores(
    database: Database,
    settings: Settings,
    incident: Incident,
    stream: Stream,
    should_stop: Callable[[], bool],
) -> ServingScores:
    """Raises NotScored, TrainingStopped."""
    rule = _rule(settings, stream.server)
    changed = names_of(incident.segments)
    with database.session() as session:
        captured = serving_scores.captured(session, stream, changed, incident.change_point_at)
    sides = [
        [one.captured.segment for one in captured if one.is_after == is_after] for is_after in (False, True)
    ]
    if all(min(side.count(segment) for side in sides) < MINIMUM_SAMPLE for segment in changed):
        raise NotScored("too_few", "too few captured requests can be scored")
    target, draft = _models(database, settings, stream)
    if torch_version() is None:
        raise NotScored("not_here", "torch is not installed beside this sidecar")
    scored, is_late = _run(settings, incident.id, target, draft, captured, should_stop)
    found = summarised(scored[0], scored[1], changed, rule)
    if found is None:
        raise NotScored(
            "timeout" if is_late else "too_few", f"only {sum(map(len, scored))} requests were scored"
        )
    return found


def _run(
    settings: Settings,
    incident_id: UUID,
    target: Path,
    draft: Path,
    captured: Sequence[ServedCapture],
    should_stop: Callable[[], bool],
) -> tuple[list[list[ScoredRequest]], bool]:
    """The scored requests before and after, and whether the time was over before all were."""
    deadline = time.monotonic() + settings.diagnosis.score_seconds

    def is_over() -> bool:
        return should_stop() or time.monotonic() > deadline

    scored: list[list[ScoredRequest]] = [[], []]
    try:
        files = workspace.create_scoring(settings.data_directory, incident_id)
        try:
            write_served(files.served, captured)
            order = Scoring(target, draft, files.served, settings.retraining.threads)
            for one in process.score(order, files.log, is_over):
                request = captured[one.number]
                counts = one.rejection, one.match, one.surprise, one.tokens
                scored[request.is_after].append(ScoredRequest(request.captured, *counts))
        finally:
            workspace.remove(files)
    except TrainingStopped:
        if should_stop():
            raise
        return scored, True
    except (TrainingFailed, OSError) as error:
        raise NotScored("failed", str(error)) from error
    return scored, False


def _rule(settings: Settings, server: str) -> Rule | None:
    """By which the engine keeps draft tokens; None where nobody says. Raises NotScored."""
    try:
        engine = engine_of(settings, server)
    except BadSettings as error:
        raise NotScored("not_registered", error.detail) from error
    if engine.admin_url is not None:
        return "rejection"  # of the built-in engine
    if engine.acceptance_rule == "typical":
        raise NotScored("typical", "engines.acceptance_rule is typical")
    return engine.acceptance_rule


def _models(database: Database, settings: Settings, stream: Stream) -> tuple[Path, Path]:
    """The directories of the stream's target and draft. Raises NotScored."""
    try:
        info = connect(database, settings, stream.server).info()
    except EngineRefused as error:
        raise NotScored("engine_silent", error.detail) from error
    if not is_trained_here(stream.method, engine_of(settings, stream.server)):
        raise NotScored("no_draft_model", f"the draft has method {stream.method}")
    target = info.target_directory if info.target == stream.target else None
    return _here(target, "target"), _here(_draft_directory(database, info, stream), "draft")


def _draft_directory(database: Database, info: EngineInfo, stream: Stream) -> str | None:
    told = {one.version: one.directory for one in (*info.drafts, info.draft)}
    if (directory := told.get(stream.draft_version)) is not None:
        return directory
    with database.session() as session:
        kept = drafts.find(session, stream.server, stream.target, stream.draft_version)
    return kept.directory if kept is not None else None


def _here(directory: str | None, role: str) -> Path:
    if directory is None:
        raise NotScored("not_here", f"the directory of the {role} is not known")
    if not is_here(Path(directory)):
        told = "is not on this machine, or may not be read"
        raise NotScored("not_here", f"the directory of the {role}, {directory}, {told}")
    return Path(directory)
