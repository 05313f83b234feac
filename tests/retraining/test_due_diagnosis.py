"""The diagnosis decides whether a retraining starts by itself."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import procrastinate
import pytest
from sqlalchemy import text

from driftguard.diagnosis import CONFIDENCES, Cause, Confidence
from driftguard.records.documents.incident import IncidentDiagnosis, SeenEvidence
from driftguard.retraining.due import why_not
from driftguard.retraining.run import retrain
from driftguard.retraining.tasks import NAMESPACE, RetrainingJobs
from driftguard.store import incidents
from driftguard.store.job_queue import deferring_connector
from tests.retraining.conftest import Drifted
from tests.retraining.engine_stub import EngineStub
from tests.retraining.world import make_settings


def diagnosis(cause: Cause, confidence: Confidence, *, calls_for_it: bool) -> IncidentDiagnosis:
    return IncidentDiagnosis(
        cause=cause,
        confidence=confidence,
        summary=f"it was {cause}",
        reason="the evidence",
        facts=(),
        missing=(),
        recommended_action="do something",
        retrain=calls_for_it,
        awaits_probes=False,
        diagnosed_at=datetime(2026, 1, 1, tzinfo=UTC),
        seen=SeenEvidence(0, 0),
    )


DRIFT = {level: diagnosis("query_drift", level, calls_for_it=True) for level in CONFIDENCES}
MACHINE = diagnosis("machine", "high", calls_for_it=False)


@pytest.mark.parametrize(
    ("found", "least", "retrains"),
    [
        (None, "low", False),
        (DRIFT["low"], "low", False),
        (DRIFT["low"], "medium", False),
        (DRIFT["medium"], "medium", True),
        (DRIFT["medium"], "high", False),
        (DRIFT["high"], "high", True),
        (MACHINE, "low", False),
    ],
)
def test_cause_and_confidence_both_count(
    found: IncidentDiagnosis | None, least: Confidence, retrains: bool
) -> None:
    assert (why_not(found, least) is None) is retrains


@pytest.mark.parametrize(("found", "queued"), [(MACHINE, 0), (DRIFT["low"], 0), (DRIFT["medium"], 1)])
def test_only_a_diagnosis_that_calls_for_it_queues_a_retraining(
    drifted: Drifted, engine: EngineStub, tmp_path: Path, found: IncidentDiagnosis, queued: int
) -> None:
    with drifted.database.session() as session:
        incidents.find(session, drifted.incident_id)[0].diagnosis = found
    jobs = RetrainingJobs(drifted.database, make_settings(tmp_path / "data", engine.url))
    app = procrastinate.App(connector=deferring_connector(drifted.database))
    app.add_tasks_from(jobs.blueprint, namespace=NAMESPACE)
    with app.open():
        jobs.defer_due(app)
    with drifted.database.session() as session:
        assert session.scalar(text("SELECT count(*) FROM procrastinate_jobs")) == queued


def test_the_nightly_job_leaves_a_faulty_machine_alone_unless_forced(
    drifted: Drifted, engine: EngineStub, tmp_path: Path
) -> None:
    with drifted.database.session() as session:
        incidents.find(session, drifted.incident_id)[0].diagnosis = MACHINE
    # So few captured requests suffice for nothing: what is refused is told by the reason.
    settings = make_settings(tmp_path / "data", engine.url, minimum_requests=300)
    outcome = retrain(drifted.database, settings, trigger="nightly")
    assert outcome.state == "nothing_to_do"
    assert "it was machine (high confidence: the evidence); do something" in outcome.reason
    assert "--force" in outcome.reason
    forced = retrain(drifted.database, settings, trigger="manual", force=True)
    assert forced.reason == "only 200 captured requests since the change, 300 needed"
    assert engine.calls == []
