"""The sidecar's own retraining: an incident queues a job, a worker runs it, a lost one is queued again."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import uuid4

import procrastinate
import pytest
from sqlalchemy import event, text

from driftguard.errors import Conflict
from driftguard.retraining.tasks import NAMESPACE, QUEUE, RetrainingJobs
from driftguard.settings import Settings
from driftguard.store import incidents, retrain_runs
from driftguard.store.database import Database
from driftguard.store.job_queue import deferring_connector, worker_connector
from driftguard.store.tables import Incident, RetrainRun
from tests.retraining.conftest import Drifted
from tests.retraining.engine_stub import EngineStub
from tests.retraining.world import MOVED, make_settings


@pytest.fixture
def patient(drifted: Drifted, engine: EngineStub, tmp_path: Path) -> Settings:
    """Too little traffic is captured for these settings, so that no job trains."""
    return make_settings(tmp_path / "data", engine.url, minimum_requests=300, aim_requests=300)


@pytest.fixture
def jobs(drifted: Drifted, patient: Settings) -> RetrainingJobs:
    return RetrainingJobs(drifted.database, patient)


@pytest.fixture
def queue(drifted: Drifted, jobs: RetrainingJobs) -> Iterator[procrastinate.App]:
    app = procrastinate.App(connector=deferring_connector(drifted.database))
    app.add_tasks_from(jobs.blueprint, namespace=NAMESPACE)
    with app.open():
        yield app


async def work(database: Database, jobs: RetrainingJobs) -> None:
    """Runs what is queued, as the sidecar's worker does."""
    app = procrastinate.App(connector=worker_connector(database))
    app.add_tasks_from(jobs.blueprint, namespace=NAMESPACE)
    async with app.open_async():
        await app.run_worker_async(queues=[QUEUE], wait=False, install_signal_handlers=False)


def waiting(database: Database) -> int:
    with database.session() as session:
        query = "SELECT count(*) FROM procrastinate_jobs WHERE status IN ('todo', 'doing')"
        return session.scalar(text(query)) or 0


def runs(database: Database) -> list[RetrainRun]:
    with database.session() as session:
        return list(retrain_runs.list_page(session, limit=10))


def unended_run(drifted: Drifted, state: str) -> RetrainRun:
    """As a killed process leaves it."""
    return RetrainRun(
        id=uuid4(),
        server="engine-1",
        target="target",
        incident_id=drifted.incident_id,
        trigger="incident",
        state=state,
        started_at=datetime.now(UTC),
        parent_version=drifted.parent,
    )


def test_an_incident_starts_one_retraining(
    drifted: Drifted, jobs: RetrainingJobs, queue: procrastinate.App
) -> None:
    jobs.defer_due(queue)
    jobs.defer_due(queue)
    assert waiting(drifted.database) == 1
    asyncio.run(work(drifted.database, jobs))
    assert waiting(drifted.database) == 0
    (run,) = runs(drifted.database)
    assert (run.trigger, run.incident_id, run.state) == ("incident", drifted.incident_id, "nothing_to_do")
    assert run.reason == "only 200 captured requests since the change, 300 needed"
    jobs.defer_due(queue)  # it waits for traffic: not before a minute has passed
    assert waiting(drifted.database) == 0


def test_a_resolved_incident_starts_nothing(
    drifted: Drifted, jobs: RetrainingJobs, queue: procrastinate.App
) -> None:
    with drifted.database.session() as session:
        incidents.move(session, drifted.incident_id, "resolved", "over", datetime.now(UTC))
    jobs.defer_due(queue)
    assert waiting(drifted.database) == 0


def test_an_operator_can_switch_it_off(
    drifted: Drifted, engine: EngineStub, queue: procrastinate.App, tmp_path: Path
) -> None:
    settings = make_settings(tmp_path / "data", engine.url, automatic=False)
    RetrainingJobs(drifted.database, settings).defer_due(queue)
    assert waiting(drifted.database) == 0


@contextmanager
def counted(database: Database) -> Iterator[Counter[str]]:
    """Statements by their first word, and incidents whose documents were read."""
    found: Counter[str] = Counter()

    def note(_c: Any, _cursor: Any, statement: str, _p: Any, _context: Any, _many: bool) -> None:
        found[statement.split(maxsplit=1)[0]] += 1

    def loaded(*_: Any) -> None:
        found["incidents"] += 1

    event.listen(database.engine, "before_cursor_execute", note)
    event.listen(Incident, "load", loaded)
    try:
        yield found
    finally:
        event.remove(database.engine, "before_cursor_execute", note)
        event.remove(Incident, "load", loaded)


@pytest.mark.parametrize("why", ["by hand", "machine"])
def test_a_look_where_nothing_is_due_writes_nothing_and_reads_no_incident(
    drifted: Drifted, engine: EngineStub, queue: procrastinate.App, tmp_path: Path, why: str
) -> None:
    """It is looked every two seconds, also while incidents are open that nothing is to be done about."""
    with drifted.database.session() as session:
        incident = incidents.find(session, drifted.incident_id)[0]
        if why == "machine":
            incident.diagnosis = replace(MOVED, cause="machine", retrain=False)
    settings = make_settings(tmp_path / "data", engine.url, automatic=why == "machine")
    jobs = RetrainingJobs(drifted.database, settings)
    with counted(drifted.database) as found:
        jobs.defer_due(queue)
    assert waiting(drifted.database) == 0
    assert found["incidents"] == found["UPDATE"] == found["INSERT"] == 0
    assert found["SELECT"] > 0


def test_a_killed_run_is_settled_and_begun_anew(
    drifted: Drifted, jobs: RetrainingJobs, queue: procrastinate.App
) -> None:
    with drifted.database.session() as session:
        retrain_runs.begin(session, unended_run(drifted, "training"))
    jobs.defer_due(queue)
    assert waiting(drifted.database) == 2  # settle, and retrain
    asyncio.run(work(drifted.database, jobs))
    states = sorted(run.state for run in runs(drifted.database))
    assert states == ["failed", "nothing_to_do"]


def test_a_running_one_is_left_alone(
    drifted: Drifted, jobs: RetrainingJobs, queue: procrastinate.App
) -> None:
    with drifted.database.session() as session:
        retrain_runs.begin(session, unended_run(drifted, "training"))
    with retrain_runs.try_lock(drifted.database, "engine-1", "target"):
        jobs.defer_due(queue)
        assert waiting(drifted.database) == 0
        with pytest.raises(Conflict, match="a retraining of engine-1 is training"):
            jobs.request(queue, None, force=True)


def test_a_request_by_hand_is_queued_once(
    drifted: Drifted, jobs: RetrainingJobs, queue: procrastinate.App
) -> None:
    assert jobs.request(queue, "engine-1", force=True) > 0
    with pytest.raises(Conflict, match="queued already"):
        jobs.request(queue, "engine-1", force=True)


def test_an_engine_that_is_away_is_asked_again(
    drifted: Drifted, queue: procrastinate.App, tmp_path: Path
) -> None:
    away = RetrainingJobs(drifted.database, make_settings(tmp_path / "data", "http://127.0.0.1:9"))
    with drifted.database.session() as session:
        retrain_runs.begin(session, unended_run(drifted, "promoting"))
    away.defer_due(queue)
    asyncio.run(work(drifted.database, away))
    assert "promoting" in {
        run.state for run in runs(drifted.database)
    }  # nobody guesses what the engine serves
    away.defer_due(queue)
    assert waiting(drifted.database) == 1
