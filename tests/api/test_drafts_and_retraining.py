"""GET drafts and retraining runs, page by page, and POST /api/v1/retrain, over real HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from uuid import uuid4

import httpx
import procrastinate
import pytest
from fastapi import FastAPI
from sqlalchemy import text

from driftguard.api import drafts as draft_routes
from driftguard.api import retraining
from driftguard.api.context import Context
from driftguard.api.pages import routes
from driftguard.api.problems import install_problem_handlers
from driftguard.ingest.queue import IngestQueue
from driftguard.metrics import Metrics
from driftguard.retraining.engines import candidate_kind
from driftguard.retraining.engines.engine_admin import EngineDraft
from driftguard.retraining.tasks import NAMESPACE, RetrainingJobs
from driftguard.settings import EngineSettings, RetrainingSettings, Settings
from driftguard.sources.otlp_push import PushedSources
from driftguard.store import drafts, retrain_runs
from driftguard.store.database import Database
from driftguard.store.job_queue import deferring_connector
from driftguard.store.tables import RetrainRun
from tests.api.ingest_server import serving

NOW = datetime(2026, 3, 1, 12, tzinfo=UTC)
RUNS = [uuid4() for _ in range(5)]


@pytest.fixture
def client(database: Database, tmp_path: Path) -> Iterator[httpx.Client]:
    engine = EngineSettings(server="engine-1", admin_url="http://127.0.0.1:9")
    with running(database, Settings(data_dir=tmp_path, engines=[engine])) as client:
        yield client


@contextmanager
def running(database: Database, settings: Settings) -> Iterator[httpx.Client]:
    jobs = RetrainingJobs(database, settings)
    queue = procrastinate.App(connector=deferring_connector(database))
    queue.add_tasks_from(jobs.blueprint, namespace=NAMESPACE)
    metrics = Metrics()
    app = FastAPI()
    ingest = IngestQueue(database, max_queued_records=10, metrics=metrics)
    pushed = PushedSources(database, ingest.submit, metrics, ())
    app.state.context = Context(
        settings=settings, database=database, ingest=ingest, metrics=metrics, pushed=pushed
    )
    app.state.request_retraining = lambda server, *, force: jobs.request(queue, server, force=force)
    app.include_router(draft_routes.router)
    app.include_router(retraining.router)
    app.include_router(routes.router)
    install_problem_handlers(app)
    with queue.open(), serving(app) as client:
        yield client


@pytest.fixture
def filled(database: Database) -> None:
    """Five runs; each made a candidate, and the last candidate was promoted."""
    with database.session() as session:
        for number, run_id in enumerate(RUNS):
            run = RetrainRun(
                id=run_id,
                server="engine-1",
                target="target",
                trigger="nightly",
                state="training" if number == 4 else "rejected",
                started_at=NOW + timedelta(days=number),
                ended_at=None if number == 4 else NOW + timedelta(days=number, minutes=5),
                progress={"step": 70, "steps": 150, "loss": 1.2, "acceptance": 0.6} if number == 4 else None,
            )
            retrain_runs.begin(session, run)
            drafts.add_candidate(
                session,
                server="engine-1",
                target="target",
                version=f"v{number}",
                method="draft_model",
                directory=f"/drafts/v{number}",
                parent_version="v0",
                run_id=run_id,
                at=NOW + timedelta(days=number),
            )
        drafts.reject(session, "engine-1", "target", "v1", NOW)


@pytest.mark.usefixtures("filled")
def test_drafts_page_by_page(client: httpx.Client) -> None:
    seen: list[str] = []
    cursor = None
    while True:
        page = client.get(
            "/api/v1/drafts", params={"limit": 2, **({"cursor": cursor} if cursor else {})}
        ).json()
        seen += [draft["version"] for draft in page["drafts"]]
        cursor = page["next_cursor"]
        if cursor is None:
            break
    assert seen == ["v4", "v3", "v2", "v1", "v0"]


@pytest.mark.usefixtures("filled")
def test_a_watch_of_weeks_is_shown_as_running_however_many_runs_have_ended_since(
    client: httpx.Client, database: Database
) -> None:
    """Those of an engine that is away fail every hour."""
    with database.session() as session:
        run = session.get_one(RetrainRun, RUNS[0])
        run.state, run.ended_at = "watching", None
        for hours in range(60):
            at = NOW + timedelta(days=9, hours=hours)
            known = {"server": "engine-2", "target": "target", "trigger": "incident", "state": "failed"}
            session.add(RetrainRun(**known, id=uuid4(), started_at=at, ended_at=at))
    page = client.get("/retraining").text
    assert "2 retrainings running" in page
    assert str(RUNS[0]) in page


@pytest.mark.usefixtures("filled")
def test_drafts_by_state(client: httpx.Client) -> None:
    (draft,) = client.get("/api/v1/drafts", params={"state": "rejected"}).json()["drafts"]
    assert (draft["version"], draft["retrain_run_id"], draft["parent_version"]) == ("v1", str(RUNS[1]), "v0")
    assert client.get("/api/v1/drafts", params={"state": "mislaid"}).status_code == 422


@pytest.mark.usefixtures("filled")
def test_runs_page_by_page_and_the_running_one_with_its_progress(client: httpx.Client) -> None:
    first = client.get("/api/v1/retrain-runs", params={"limit": 3}).json()
    rest = client.get("/api/v1/retrain-runs", params={"limit": 3, "cursor": first["next_cursor"]}).json()
    assert [run["id"] for run in first["runs"] + rest["runs"]] == [str(run_id) for run_id in reversed(RUNS)]
    assert rest["next_cursor"] is None
    (running,) = client.get("/api/v1/retrain-runs", params={"state": "running"}).json()["runs"]
    assert running["progress"]["step"] == 70
    shown = client.get(f"/api/v1/retrain-runs/{RUNS[4]}").json()
    assert shown.pop("curve") is None
    assert shown == running


def test_what_does_not_exist_or_is_no_cursor_is_said(client: httpx.Client) -> None:
    answer = client.get(f"/api/v1/retrain-runs/{uuid4()}")
    assert answer.status_code == 404
    assert "there is no retraining run" in answer.json()["detail"]
    for path in ("/api/v1/drafts", "/api/v1/retrain-runs"):
        for cursor in ("nonsense", "MjAyNi0wMy0wMVQxMjowMDowMCswMDowMHx4"):
            answer = client.get(path, params={"cursor": cursor})
            assert answer.status_code == 422
            assert answer.json()["field"] == "cursor"


def test_a_retraining_is_queued_once(client: httpx.Client) -> None:
    answer = client.post("/api/v1/retrain", json={"force": True})
    assert answer.status_code == 202
    assert answer.json()["job_id"] > 0
    again = client.post("/api/v1/retrain", json={"server": "engine-1"})
    assert again.status_code == 409
    assert "queued already" in again.json()["detail"]


def test_without_torch_a_retraining_is_refused_at_once_and_where_to_run_it_is_said(
    client: httpx.Client, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was queued, and some seconds later there was a failed run, and a page."""
    monkeypatch.setattr(candidate_kind, "find_spec", lambda _: None)
    for body, command in (
        ({"force": True}, "driftguard retrain --server engine-1 --force"),
        ({"server": "engine-1", "force": True}, "driftguard retrain --server engine-1 --force"),
        ({"server": "engine-1"}, "driftguard retrain --server engine-1"),
    ):
        answer = client.post("/api/v1/retrain", json=body)
        assert answer.status_code == 409
        assert answer.json()["detail"] == (
            f"torch is not installed beside this sidecar, so it makes no draft: run `{command}` where it is, "
            "as the nightly job does"
        )
    with database.session() as session:
        assert session.scalar(text("SELECT count(*) FROM procrastinate_jobs")) == 0
    assert client.get("/api/v1/retrain-runs").json()["runs"] == []
    unknown = client.post("/api/v1/retrain", json={"server": "other", "force": True})
    assert unknown.status_code == 422


def test_without_torch_a_retraining_that_runs_elsewhere_is_told(
    client: httpx.Client, database: Database, filled: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To run the command would only say the same."""
    monkeypatch.setattr(candidate_kind, "find_spec", lambda _: None)
    with retrain_runs.try_lock(database, "engine-1", "target"):
        answer = client.post("/api/v1/retrain", json={"force": True})
    assert (answer.status_code, answer.json()["detail"]) == (409, "a retraining of engine-1 is training")


def test_a_request_for_nothing_that_exists_is_refused(client: httpx.Client) -> None:
    assert client.post("/api/v1/retrain", json={"sever": "engine-1"}).status_code == 422
    assert client.post("/api/v1/retrain", json={"force": "no"}).status_code == 422
    as_json = {"Content-Type": "application/json"}
    garbled = client.post("/api/v1/retrain", content=b"\xff", headers=as_json)
    assert (garbled.status_code, garbled.json()["detail"]) == (400, "the body is not JSON text")
    answer = client.post("/api/v1/retrain", json={"server": "other"})
    assert answer.status_code == 422
    assert "not among the engines in the settings: engine-1" in answer.json()["detail"]


def test_a_rollback_names_what_it_takes_back_and_why(client: httpx.Client) -> None:
    body = {"server": "engine-1", "draft_version": "v1", "reason": "it loops"}
    for field, value in (("server", "other"), ("reason", "  "), ("reason", "it\0loops")):
        answer = client.post("/api/v1/rollback", json={**body, field: value})
        assert answer.status_code == 422
        assert field in answer.text
    answer = client.post("/api/v1/rollback", json=body)
    assert answer.status_code == 502
    assert "the engine at http://127.0.0.1:9 cannot be reached" in answer.json()["detail"]


@pytest.mark.parametrize("is_restarted", [False, True], ids=["asked for the draft", "restarted with it"])
def test_a_rollback_says_whether_records_of_the_draft_are_awaited(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_restarted: bool
) -> None:
    models = {"target_directory": tmp_path, "draft_directory": tmp_path, "num_speculative_tokens": 4}
    place = models if is_restarted else {"admin_url": "http://127.0.0.1:9"}
    engine = EngineSettings.model_validate({"server": "engine-1", **place})
    rules = RetrainingSettings(promote_command=["true"] if is_restarted else [])
    monkeypatch.setattr(retraining, "roll_back", lambda *_, **__: EngineDraft("v0", "v0", "draft_model"))
    body = {"server": "engine-1", "draft_version": "v1", "reason": "it loops"}
    with running(database, Settings(data_dir=tmp_path, engines=[engine], retraining=rules)) as client:
        answer = client.post("/api/v1/rollback", json=body).json()
    assert answer == {"server": "engine-1", "draft_version": "v0", "awaited": is_restarted}
