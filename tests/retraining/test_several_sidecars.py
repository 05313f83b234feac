"""Several sidecars on one database have different engines in their settings: what one cannot do is left to
the one that can."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import procrastinate
import pytest
from sqlalchemy import text

from driftguard.errors import DatabaseUnavailable
from driftguard.records.documents.incident import SeenEvidence
from driftguard.retraining import tasks
from driftguard.retraining.tasks import RetrainingJobs
from driftguard.settings import EngineSettings
from driftguard.store import configured_engines, incidents, retrain_runs
from tests.retraining.conftest import Drifted
from tests.retraining.test_tasks import AWAY, jobs, patient, queue, runs, unended_run, waiting, work
from tests.retraining.world import MOVED, make_settings

__all__ = ["jobs", "patient", "queue"]


@pytest.fixture
def beside(drifted: Drifted, tmp_path: Path) -> RetrainingJobs:
    """Of a sidecar on the same database that has another engine, as in the pod of another server."""
    settings = make_settings(tmp_path / "beside", AWAY)
    other = EngineSettings(server="engine-2", admin_url=AWAY)
    return RetrainingJobs(drifted.database, settings.model_copy(update={"engines": [other]}))


def test_scores_are_left_to_the_sidecar_that_has_the_engine(
    drifted: Drifted, jobs: RetrainingJobs, beside: RetrainingJobs, queue: procrastinate.App
) -> None:
    with drifted.database.session() as session:
        incident = incidents.find(session, drifted.incident_id)[0]
        incident.diagnosis = replace(MOVED, seen=SeenEvidence(probes=0, captures=100))
    jobs.defer_due(queue)
    assert waiting(drifted.database) == 1
    for _ in range(2):
        asyncio.run(work(drifted.database, beside))
        beside.defer_due(queue)
    assert waiting(drifted.database) == 1
    asyncio.run(work(drifted.database, jobs))
    assert waiting(drifted.database) == 0


def test_jobs_and_runs_are_left_to_the_sidecar_that_has_the_engine(
    drifted: Drifted,
    jobs: RetrainingJobs,
    beside: RetrainingJobs,
    queue: procrastinate.App,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks, "STARTED_SECONDS", 0.0)
    with drifted.database.session() as session:
        retrain_runs.begin(session, unended_run(drifted, "promoting"))
    jobs.defer_due(queue)
    assert waiting(drifted.database) == 2  # settle, and retrain
    beside.defer_due(queue)
    asyncio.run(work(drifted.database, beside))
    assert waiting(drifted.database) == 2
    assert [run.state for run in runs(drifted.database)] == ["promoting"]
    asyncio.run(work(drifted.database, jobs))
    assert waiting(drifted.database) == 0
    assert "promoting" not in {run.state for run in runs(drifted.database)}


@pytest.mark.parametrize(("away", "state"), [(55, "promoting"), (65, "failed")])
def test_a_sidecar_that_is_stopped_for_less_than_an_hour_finds_its_run_as_it_was(
    drifted: Drifted,
    jobs: RetrainingJobs,
    beside: RetrainingJobs,
    queue: procrastinate.App,
    monkeypatch: pytest.MonkeyPatch,
    away: int,
    state: str,
) -> None:
    monkeypatch.setattr(tasks, "STARTED_SECONDS", 0.0)
    jobs.defer_due(queue)
    with drifted.database.session() as session:
        retrain_runs.begin(session, unended_run(drifted, "promoting"))
        session.execute(text(f"UPDATE configured_engines SET told_at = now() - interval '{away} minutes'"))
    beside.defer_due(queue)
    assert [run.state for run in runs(drifted.database)] == [state]


def test_a_sidecar_that_has_just_started_ends_nothing_of_one_that_has_told_nothing_yet(
    drifted: Drifted, beside: RetrainingJobs, queue: procrastinate.App
) -> None:
    with drifted.database.session() as session:
        incident = incidents.find(session, drifted.incident_id)[0]
        incident.diagnosis = replace(MOVED, seen=SeenEvidence(probes=0, captures=100))
        retrain_runs.begin(session, unended_run(drifted, "promoting"))
    beside.defer_due(queue)
    assert waiting(drifted.database) == 0
    assert [run.state for run in runs(drifted.database)] == ["promoting"]


def test_a_look_that_failed_is_made_up_for_at_once(
    drifted: Drifted, jobs: RetrainingJobs, queue: procrastinate.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(configured_engines, "tell", fail)
        with pytest.raises(DatabaseUnavailable):
            jobs.defer_due(queue)
    jobs.defer_due(queue)
    with drifted.database.session() as session:
        assert configured_engines.told(session) == {"engine-1"}


def fail(*_: object) -> None:
    raise DatabaseUnavailable("the database is away")
