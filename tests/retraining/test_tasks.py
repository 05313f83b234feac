"""The sidecar's own retraining: an incident queues a job, a worker runs it, a lost one is queued again."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import chain
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import msgspec
import procrastinate
import psycopg
import pytest
from sqlalchemy import event, text, update
from structlog.testing import capture_logs

from driftguard.app import Sidecar
from driftguard.errors import Conflict
from driftguard.records.documents.retraining_run import RunNumbers, Watch
from driftguard.retraining import tasks
from driftguard.retraining.due import MAXIMUM_FAILURES, RETRY_FAILED_AFTER
from driftguard.retraining.engines import candidate_kind
from driftguard.retraining.ledger.outcome import RetrainOutcome
from driftguard.retraining.run import retrain
from driftguard.retraining.tasks import NAMESPACE, RetrainingJobs, defer_retraining
from driftguard.settings import EngineSettings, Settings
from driftguard.store import drafts, incidents, retrain_runs
from driftguard.store.database import Database
from driftguard.store.job_queue import deferring_connector, worker_connector
from driftguard.store.tables import Draft, Incident, RetrainRun, Stream
from tests.retraining.conftest import Drifted
from tests.retraining.engine_stub import EngineStub
from tests.retraining.promotion.test_clocks import TWO_HOURS, clock_off_by
from tests.retraining.promotion.test_put_back import found_worse, promoted_an_hour_ago
from tests.retraining.promotion.test_watch_hook import CANDIDATE, promoted
from tests.retraining.world import BEFORE, MOVED, OLD, incident_of, make_settings, rates, record, store

__all__ = ["promoted"]

AWAY = "http://127.0.0.1:9"
OUTAGE_SECONDS = 12.0  # longer than two looks of a worker are apart, and than it waits for a connection


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
        queues = list(chain.from_iterable(jobs.queues.values()))
        await app.run_worker_async(queues=queues, wait=False, install_signal_handlers=False)


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


@pytest.mark.parametrize("difference", [-TWO_HOURS, TWO_HOURS])
def test_a_sidecar_whose_clock_is_wrong_waits_as_long_before_it_looks_again(
    drifted: Drifted, jobs: RetrainingJobs, queue: procrastinate.App, difference: timedelta
) -> None:
    """Runs are dated by the clock of the database."""
    with clock_off_by(difference):
        jobs.defer_due(queue)
        asyncio.run(work(drifted.database, jobs))
        jobs.defer_due(queue)
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


def test_without_torch_an_incident_starts_no_run_that_must_fail(
    drifted: Drifted, patient: Settings, queue: procrastinate.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three failed for each incident, and each was told to operators by DriftGuardRetrainFailed."""
    monkeypatch.setattr(candidate_kind, "find_spec", lambda _: None)
    with capture_logs() as logs:
        RetrainingJobs(drifted.database, patient).defer_due(queue)
    assert waiting(drifted.database) == 0
    assert [line["log_level"] for line in logs if "torch is not installed" in line["event"]] == ["warning"]


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
def test_a_look_where_nothing_is_due_reads_no_incident_and_writes_once_a_minute(
    drifted: Drifted, engine: EngineStub, queue: procrastinate.App, tmp_path: Path, why: str
) -> None:
    """It is looked every two seconds, also while incidents are open that nothing is to be done about."""
    with drifted.database.session() as session:
        incident = incidents.find(session, drifted.incident_id)[0]
        if why == "machine":
            incident.diagnosis = replace(MOVED, cause="machine", retrain=False)
    settings = make_settings(tmp_path / "data", engine.url, automatic=why == "machine")
    jobs = RetrainingJobs(drifted.database, settings)
    for told in (1, 0):  # once a minute, which servers are in the settings
        with counted(drifted.database) as found:
            jobs.defer_due(queue)
        assert waiting(drifted.database) == 0
        assert found["INSERT"] == told
        assert found["incidents"] == found["UPDATE"] == found["DELETE"] == 0
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


def test_a_training_that_restarts_of_the_sidecar_stop_is_begun_anew_however_often(
    drifted: Drifted, engine: EngineStub, tmp_path: Path
) -> None:
    settings = make_settings(tmp_path / "data", engine.url)
    jobs = RetrainingJobs(drifted.database, settings, lambda: bool(runs(drifted.database)))
    app = procrastinate.App(connector=deferring_connector(drifted.database))
    app.add_tasks_from(jobs.blueprint, namespace=NAMESPACE)
    with app.open():
        for count in range(MAXIMUM_FAILURES + 1):
            jobs.defer_due(app)
            assert waiting(drifted.database) == 1
            asyncio.run(work(drifted.database, jobs))
            stopped = runs(drifted.database)
            assert [run.reason for run in stopped] == ["stopped on request"] * (count + 1)
            with drifted.database.session() as session:  # so that it is due again
                session.execute(update(RetrainRun).values(ended_at=datetime.now(UTC) - RETRY_FAILED_AFTER))


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
        watch = Watch((), (), 0.05, 400, 0, recovered=False, verdict="worse")
        with drifted.database.session() as session:  # it settles first
            (run,) = retrain_runs.unended(session)
            run.state, run.numbers = "watching", RunNumbers(watch=watch)
        jobs.defer_due(queue)
        assert waiting(drifted.database) == 0


def test_a_request_by_hand_is_queued_once(
    drifted: Drifted, jobs: RetrainingJobs, queue: procrastinate.App
) -> None:
    assert jobs.request(queue, "engine-1", force=True) > 0
    with pytest.raises(Conflict, match="queued already"):
        jobs.request(queue, "engine-1", force=True)


def test_a_retraining_asked_for_by_hand_can_be_run_by_an_older_sidecar_on_the_same_database(
    jobs: RetrainingJobs, queue: procrastinate.App, database: Database
) -> None:
    """While several are upgraded one by one. A job with an argument that it does not know fails there."""
    jobs.request(queue, "engine-1", force=False)
    with database.session() as session:
        (arguments,) = session.scalars(text("SELECT args FROM procrastinate_jobs"))
    assert arguments.keys() == {"server", "trigger", "incident_id", "force"}


@pytest.mark.parametrize(("state", "times"), [("failed", 1), ("nothing_to_do", 2)])
def test_two_who_ask_at_once_get_one_retraining(
    drifted: Drifted,
    jobs: RetrainingJobs,
    queue: procrastinate.App,
    monkeypatch: pytest.MonkeyPatch,
    state: str,
    times: int,
) -> None:
    """While the job of the first begins, no run tells the second that there is one."""
    begun: list[bool] = []

    def train(*_: object, force: bool, **__: object) -> RetrainOutcome:
        begun.append(force)
        if len(begun) == 1:
            jobs.request(queue, "engine-1", force=True)
        run = unended_run(drifted, state)
        run.ended_at = run.started_at
        with drifted.database.session() as session:
            retrain_runs.begin(session, run)
        return RetrainOutcome("failed", "no training", run_id=run.id)

    monkeypatch.setattr("driftguard.retraining.tasks.retrain", train)
    jobs.request(queue, "engine-1", force=True)
    asyncio.run(work(drifted.database, jobs))
    assert begun == [True] * times
    assert waiting(drifted.database) == 0
    jobs.request(queue, "engine-1", force=True)  # a later wish counts
    asyncio.run(work(drifted.database, jobs))
    assert len(begun) == times + 1


def lose(database: Database, status: str) -> None:
    """As a killed worker leaves its job, or one that lost the database."""
    with database.session() as session:
        session.execute(text(f"UPDATE procrastinate_jobs SET status = '{status}', worker_id = NULL"))


@pytest.mark.parametrize("status", ["doing", "failed"])
def test_what_was_asked_for_and_not_begun_is_done_by_the_next_sidecar(
    drifted: Drifted, jobs: RetrainingJobs, queue: procrastinate.App, status: str
) -> None:
    """One that was killed while it asked the engine, say, or to which the database was away."""
    job_id = jobs.request(queue, "engine-1", force=False)
    lose(drifted.database, status)
    with drifted.database.session() as session:
        incidents.move(session, drifted.incident_id, "resolved", "over", datetime.now(UTC))
    with capture_logs() as logs:
        jobs.defer_due(queue)
    assert [(line["log_level"], line["job"]) for line in logs if "job" in line] == [("warning", job_id)]
    asyncio.run(work(drifted.database, jobs))
    assert [(run.trigger, run.state) for run in runs(drifted.database)] == [("manual", "nothing_to_do")]
    assert waiting(drifted.database) == 0


def test_what_was_asked_for_and_had_begun_is_not_done_again(
    drifted: Drifted, jobs: RetrainingJobs, queue: procrastinate.App
) -> None:
    """Its run tells that it was interrupted."""
    jobs.request(queue, "engine-1", force=True)
    lose(drifted.database, "doing")
    with drifted.database.session() as session:
        incidents.move(session, drifted.incident_id, "resolved", "over", datetime.now(UTC))
        retrain_runs.begin(session, unended_run(drifted, "training"))
    with capture_logs() as logs:
        jobs.defer_due(queue)
    assert [line for line in logs if "job" in line] == []
    asyncio.run(work(drifted.database, jobs))
    assert [run.state for run in runs(drifted.database)] == ["failed"]
    assert waiting(drifted.database) == 0


def test_a_retraining_asked_for_while_the_server_is_settled_for_long_says_so_among_the_runs(
    drifted: Drifted, jobs: RetrainingJobs, queue: procrastinate.App, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a command that restarts its engine for minutes."""
    monkeypatch.setattr("driftguard.retraining.run.SETTLING_SECONDS", 0.0)
    jobs.request(queue, "engine-1", force=True)
    with retrain_runs.try_lock(drifted.database, "engine-1", "target"):
        asyncio.run(work(drifted.database, jobs))
    (answer,) = runs(drifted.database)
    assert (answer.trigger, answer.state) == ("manual", "nothing_to_do")
    assert "try again in a minute" in (answer.reason or "")


def test_a_retraining_asked_for_whose_sidecar_stops_while_it_waits_is_done_by_the_next_one(
    drifted: Drifted, patient: Settings, queue: procrastinate.App, caplog: pytest.LogCaptureFixture
) -> None:
    stopped = RetrainingJobs(drifted.database, patient, should_stop=lambda: True)
    stopped.request(queue, "engine-1", force=False)
    with retrain_runs.try_lock(drifted.database, "engine-1", "target"):
        asyncio.run(work(drifted.database, stopped))
    assert runs(drifted.database) == []
    (told,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "stopped before it began" in told.getMessage()
    assert told.exc_info is None  # a stop is no failure of the program
    with drifted.database.session() as session:
        incidents.move(session, drifted.incident_id, "resolved", "over", datetime.now(UTC))
    after = RetrainingJobs(drifted.database, patient)
    after.defer_due(queue)
    asyncio.run(work(drifted.database, after))
    assert [(each.trigger, each.state) for each in runs(drifted.database)] == [("manual", "nothing_to_do")]


def test_the_job_of_a_sidecar_that_lives_and_one_that_another_waits_behind_are_left_alone(
    drifted: Drifted, jobs: RetrainingJobs, queue: procrastinate.App
) -> None:
    with drifted.database.session() as session:
        incidents.move(session, drifted.incident_id, "resolved", "over", datetime.now(UTC))
    jobs.request(queue, "engine-1", force=True)
    begun = "UPDATE procrastinate_jobs SET status = 'doing', worker_id = {} WHERE status = 'todo'"
    with drifted.database.session() as session:
        worker = session.scalar(text("SELECT worker_id FROM procrastinate_register_worker_v1()"))
        session.execute(text(begun.format(worker)))
    jobs.defer_due(queue)
    assert waiting_for_a_worker(drifted.database) == 0
    lose(drifted.database, "doing")
    second = jobs.request(queue, "engine-1", force=True)
    RetrainingJobs(drifted.database, jobs._settings).defer_due(queue)
    assert waiting_for_a_worker(drifted.database) == 1
    assert second > 0


def waiting_for_a_worker(database: Database) -> int:
    with database.session() as session:
        return session.scalar(text("SELECT count(*) FROM procrastinate_jobs WHERE status = 'todo'")) or 0


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


def test_an_engine_that_was_away_for_long_gets_its_retraining_when_it_is_back(
    drifted: Drifted, jobs: RetrainingJobs, queue: procrastinate.App, tmp_path: Path
) -> None:
    away = make_settings(tmp_path / "data", "http://127.0.0.1:9")
    for hours in range(5, 0, -1):
        retrain(drifted.database, away, trigger="incident", incident_id=drifted.incident_id)
        past = datetime.now(UTC) - timedelta(hours=hours)
        with drifted.database.session() as session:
            session.execute(
                update(RetrainRun)
                .where(RetrainRun.ended_at > datetime.now(UTC) - timedelta(minutes=1))
                .values(started_at=past, ended_at=past)
            )
    assert [run.state for run in runs(drifted.database)] == ["failed"] * 5
    jobs.defer_due(queue)
    assert waiting(drifted.database) == 1


def serve_another(drifted: Drifted, engine: EngineStub, version: str) -> None:
    """The engine is started with another draft, whose records come from now on."""
    engine.serving = {**engine.serving, "version": version}
    engine.loaded = {version: engine.serving}
    with drifted.database.session() as session:
        half_an_hour_ago = datetime.now(UTC) - timedelta(minutes=30)
        session.execute(update(Stream).values(traffic_arrived_at=half_an_hour_ago))  # of the others
    now = datetime.now(UTC)
    store(drifted.database, [record(version, OLD, rate, now) for rate in rates(BEFORE, 5)])


def in_service(drifted: Drifted) -> str | None:
    with drifted.database.session() as session:
        found = drafts.in_service(session, "engine-1", "target")
        return None if found is None else found.version


def test_a_draft_that_somebody_else_puts_into_service_is_followed_without_a_retraining(
    drifted: Drifted, engine: EngineStub, patient: Settings, queue: procrastinate.App
) -> None:
    quiet = patient.model_copy(
        update={"retraining": patient.retraining.model_copy(update={"automatic": False})}
    )
    jobs = RetrainingJobs(drifted.database, quiet)
    retrain(drifted.database, quiet, trigger="nightly")  # it notes which draft is in service
    assert in_service(drifted) == drifted.parent
    jobs.defer_due(queue)
    assert waiting(drifted.database) == 0
    serve_another(drifted, engine, "by-operator")
    jobs = RetrainingJobs(drifted.database, quiet)  # which servers serve is looked at once a minute
    jobs.defer_due(queue)
    jobs.defer_due(queue)
    assert waiting(drifted.database) == 1
    asyncio.run(work(drifted.database, jobs))
    assert in_service(drifted) == "by-operator"


def test_a_watch_ends_where_somebody_has_returned_to_the_draft_before(
    drifted: Drifted, promoted: UUID, engine: EngineStub, jobs: RetrainingJobs, queue: procrastinate.App
) -> None:
    serve_another(drifted, engine, drifted.parent)
    jobs.defer_due(queue)
    asyncio.run(work(drifted.database, jobs))
    assert in_service(drifted) == drifted.parent
    (run,) = [each for each in runs(drifted.database) if each.id == promoted]
    assert (run.state, run.reason) == (
        "promoted",
        f"promoted; no longer watched, because draft {drifted.parent} is in service now",
    )
    assert incident_of(drifted.database, drifted.incident_id).state != "mitigating"


def test_a_draft_that_was_found_worse_and_replaced_is_told_to_be_worse(
    drifted: Drifted, promoted: UUID, engine: EngineStub, jobs: RetrainingJobs
) -> None:
    """Whoever rolls the next one back returns to it."""
    found_worse(drifted, promoted)
    serve_another(drifted, engine, "by-operator")
    jobs.settle("engine-1")
    (run,) = [each for each in runs(drifted.database) if each.id == promoted]
    assert run.state == "promoted"
    assert run.reason == (
        f"draft {CANDIDATE} accepted less than the one before it: no requests of judged segments; draft "
        f"{drifted.parent} was not put back, because draft by-operator is in service now"
    )


def test_a_draft_that_its_engine_lost_is_put_back_at_the_next_look_after_its_first_record(
    drifted: Drifted, promoted: UUID, engine: EngineStub, jobs: RetrainingJobs, queue: procrastinate.App
) -> None:
    """Records of the promoted draft arrived until just now."""
    directory = promoted_an_hour_ago(drifted)
    engine.start_again()
    now = datetime.now(UTC)
    store(drifted.database, [record(CANDIDATE, OLD, rate, now) for rate in rates(BEFORE, 5)])
    store(drifted.database, [record(drifted.parent, OLD, rate, now) for rate in rates(BEFORE, 5)])
    jobs.defer_due(queue)
    asyncio.run(work(drifted.database, jobs))
    assert (engine.serving["version"], engine.serving["directory"]) == (CANDIDATE, directory)
    assert in_service(drifted) == CANDIDATE


@contextmanager
def out_of_reach(server_url: str, database: Database) -> Iterator[None]:
    name = database.url.database
    with psycopg.connect(server_url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {name} WITH ALLOW_CONNECTIONS false")
        ended = "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = %s"
        connection.execute(ended, [name])
        try:
            yield
        finally:
            connection.execute(f"ALTER DATABASE {name} WITH ALLOW_CONNECTIONS true")


@pytest.mark.parametrize("is_cut_off", [False, True])
def test_a_rollback_waits_for_no_training_of_another_server(
    drifted: Drifted, postgres_server: str, monkeypatch: pytest.MonkeyPatch, is_cut_off: bool
) -> None:
    """By the sidecar's own workers; also where the database was away during the training."""
    other = EngineSettings(server="engine-2", admin_url=AWAY)
    settings = drifted.settings.model_copy(update={"engines": [*drifted.settings.engines, other]})
    sidecar = Sidecar(settings, drifted.database, "http://sidecar")
    training, settled, meanwhile = threading.Event(), threading.Event(), list[bool]()

    def train(*_: object, server: str, **__: object) -> RetrainOutcome:
        if server == "engine-2":  # that of the incident may begin once this one has ended
            training.set()
            meanwhile.append(settled.wait(60.0))
        return RetrainOutcome("failed", "no training")

    monkeypatch.setattr("driftguard.retraining.tasks.retrain", train)
    monkeypatch.setattr("driftguard.retraining.tasks.settle", lambda *_: settled.set())

    async def run() -> None:
        workers = asyncio.create_task(sidecar.work())
        assert await asyncio.to_thread(training.wait, 60.0)
        if is_cut_off:
            with out_of_reach(postgres_server, drifted.database):
                await asyncio.sleep(OUTAGE_SECONDS)
        with drifted.database.session() as session:
            retrain_runs.begin(session, unended_run(drifted, "promoting"))
        await asyncio.to_thread(sidecar._retraining.defer_due, sidecar._deferring)
        assert await asyncio.to_thread(settled.wait, 60.0)
        sidecar._stopping.set()
        workers.cancel()
        await asyncio.gather(workers, return_exceptions=True)

    with sidecar._deferring.open():
        defer_retraining(sidecar._deferring, "engine-2", "nightly")
        asyncio.run(run())
    assert meanwhile == [True]


def test_a_server_may_have_a_long_name(drifted: Drifted, patient: Settings) -> None:
    """PostgreSQL cuts the names of channels, on which workers hear of jobs, at 63 bytes."""
    name = "Gespräche-" * 20
    engine = EngineSettings(server=name, admin_url=AWAY)
    jobs = RetrainingJobs(drifted.database, patient.model_copy(update={"engines": [engine]}))
    app = procrastinate.App(connector=deferring_connector(drifted.database))
    app.add_tasks_from(jobs.blueprint, namespace=NAMESPACE)
    with app.open():
        jobs.request(app, name, force=False)
    asyncio.run(work(drifted.database, jobs))
    assert waiting(drifted.database) == 0


def test_what_was_asked_for_days_ago_is_not_done_any_more(
    drifted: Drifted, jobs: RetrainingJobs, queue: procrastinate.App
) -> None:
    """As where the engine was taken out of the settings meanwhile, and is put back."""
    two_days_ago = datetime.now(UTC) - timedelta(days=2)
    defer_retraining(queue, "engine-1", "manual", force=True, asked_at=two_days_ago)
    asyncio.run(work(drifted.database, jobs))
    assert waiting(drifted.database) == 0
    assert runs(drifted.database) == []


def test_a_killed_run_of_a_server_that_is_no_longer_in_the_settings_ends(
    drifted: Drifted, patient: Settings, queue: procrastinate.App
) -> None:
    with drifted.database.session() as session:
        retrain_runs.begin(session, unended_run(drifted, "training"))
    jobs = RetrainingJobs(drifted.database, patient.model_copy(update={"engines": []}))
    with retrain_runs.try_lock(drifted.database, "engine-1", "target"):
        jobs.defer_due(queue)
        assert runs(drifted.database)[0].state == "training"  # it lives
    jobs.defer_due(queue)
    run = runs(drifted.database)[0]
    assert (run.state, run.reason) == (
        "failed",
        "interrupted while training; the draft in service is as it was",
    )
    assert waiting(drifted.database) == 0


def test_a_target_that_took_the_place_of_another_is_settled(
    drifted: Drifted, engine: EngineStub, jobs: RetrainingJobs
) -> None:
    """So that a watch over a draft of the one before ends."""
    jobs.settle("engine-1")
    engine.target_name, engine.serving = "another", {**engine.serving, "version": "of-another"}
    with drifted.database.session() as session:
        assert list(jobs._unfollowed(session)) == []
    made = msgspec.structs.replace(record("of-another", OLD, 0.7, datetime.now(UTC)), target="another")
    store(drifted.database, [made])
    with drifted.database.session() as session:
        assert list(jobs._unfollowed(session)) == ["engine-1"]
    jobs.settle("engine-1")
    with drifted.database.session() as session:
        assert list(jobs._unfollowed(session)) == []


@pytest.mark.parametrize(
    ("is_asked", "hours", "known"), [(True, 0, True), (False, 2, True), (False, 0, False)]
)
def test_the_draft_of_a_target_that_took_the_place_of_another_is_known_where_its_version_stayed(
    drifted: Drifted,
    engine: EngineStub,
    jobs: RetrainingJobs,
    queue: procrastinate.App,
    is_asked: bool,
    hours: int,
    known: bool,
) -> None:
    """At once where the engine can be asked; else once the target before it was silent for an hour."""
    jobs.settle("engine-1")
    engine.target_name = "another"
    if not is_asked:
        there = {"target_directory": Path("target"), "draft_directory": Path("draft")}
        restarted = EngineSettings(server="engine-1", num_speculative_tokens=4, **there)
        settings = jobs._settings.model_copy(update={"engines": [restarted]})
        jobs = RetrainingJobs(drifted.database, settings)
    made = record(drifted.parent, OLD, 0.7, datetime.now(UTC))
    store(drifted.database, [msgspec.structs.replace(made, target="another")])
    with drifted.database.session() as session:
        session.execute(
            update(Stream)
            .where(Stream.target == "target")
            .values(traffic_arrived_at=Stream.traffic_arrived_at - timedelta(hours=hours))
        )
        incidents.move(session, drifted.incident_id, "resolved", "over", datetime.now(UTC))
    jobs.defer_due(queue)
    asyncio.run(work(drifted.database, jobs))
    with drifted.database.session() as session:
        found = drafts.in_service(session, "engine-1", "another")
    assert (found.version if found else None) == (drifted.parent if known else None)
    RetrainingJobs(drifted.database, jobs._settings).defer_due(queue)
    assert waiting(drifted.database) == 0


def test_a_rollback_that_the_engine_refuses_is_told_and_asked_for_once_a_minute(
    drifted: Drifted,
    promoted: UUID,
    engine: EngineStub,
    jobs: RetrainingJobs,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each attempt costs the requests that it serves, and the worse draft goes on serving."""
    promoted_an_hour_ago(drifted)
    found_worse(drifted, promoted)
    engine.refuse = "load"
    for _ in range(3):
        jobs.settle("engine-1")
    assert engine.calls == ["load"]
    run = runs(drifted.database)[0]
    reason = run.reason or ""
    assert run.state == "watching"
    assert reason.startswith(f"draft {CANDIDATE} accepted less than the one before it")
    assert f"; draft {drifted.parent} cannot be put back: the engine at {engine.url} answered" in reason
    assert reason.endswith("with 500: out of memory")
    assert incident_of(drifted.database, drifted.incident_id).state == "open"  # nothing mends it now
    engine.refuse = ""
    monkeypatch.setattr(tasks, "REFUSED_SECONDS", 0.0)
    jobs.settle("engine-1")
    assert engine.serving["version"] == drifted.parent
    assert runs(drifted.database)[0].state == "rolled_back"


def test_a_rollback_to_a_draft_whose_files_are_gone_is_told_and_done_once_they_are_back(
    drifted: Drifted,
    promoted: UUID,
    engine: EngineStub,
    jobs: RetrainingJobs,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The parent was trained here too."""
    promoted_an_hour_ago(drifted)
    found_worse(drifted, promoted)
    made_here = tmp_path / "data" / "drafts" / drifted.parent
    made_here.parent.mkdir(parents=True, exist_ok=True)
    with drifted.database.session() as session:
        is_parent = Draft.version == drifted.parent
        session.execute(
            update(Draft).where(is_parent).values(directory=str(made_here), retrain_run_id=promoted)
        )
    jobs.settle("engine-1")
    assert engine.calls == []
    assert (runs(drifted.database)[0].reason or "").endswith(
        f"cannot be put back: the files of draft {drifted.parent}, in {made_here}, are gone: "
        "bring them back, as from a backup, or put another draft into service"
    )
    assert incident_of(drifted.database, drifted.incident_id).state == "open"
    made_here.mkdir()
    (made_here / "SHA256SUMS").write_text("0" * 64 + "  model.safetensors")
    monkeypatch.setattr(tasks, "REFUSED_SECONDS", 0.0)
    jobs.settle("engine-1")
    assert engine.calls == []
    assert f"{made_here}/model.safetensors cannot be read" in (runs(drifted.database)[0].reason or "")
    (made_here / "SHA256SUMS").unlink()
    jobs.settle("engine-1")
    assert engine.serving["version"] == drifted.parent
    assert runs(drifted.database)[0].state == "rolled_back"
