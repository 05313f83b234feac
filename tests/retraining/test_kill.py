"""kill -9 in the middle of a retraining: the draft in service stays, and the next run starts cleanly."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from structlog.testing import capture_logs

from driftguard.demo.processes import free_port
from driftguard.records.documents.retraining_run import RunNumbers, Watch
from driftguard.retraining.run import retrain
from driftguard.retraining.tasks import RetrainingJobs
from driftguard.settings import Settings
from driftguard.store import drafts, retrain_runs
from driftguard.store.tables import RetrainRun
from tests.forked import ForkedProcess, forked
from tests.retraining import retrain_process
from tests.retraining.conftest import Drifted
from tests.retraining.engine_stub import EngineStub
from tests.retraining.world import incident_states, make_settings, trained

PATIENCE_SECONDS = 150.0


def start(drifted: Drifted, data_dir: Path, engine: EngineStub) -> subprocess.Popen[bytes]:
    url = drifted.database.url.render_as_string(hide_password=False)
    command = [sys.executable, "-m", "tests.retraining.retrain_process"]
    return subprocess.Popen([*command, url, str(data_dir), engine.url, "1000000"])


@contextmanager
def forked_run(drifted: Drifted, data_dir: Path, engine: EngineStub) -> Iterator[ForkedProcess]:
    """Trains in the process itself: it is killed later than that."""
    url = drifted.database.url.render_as_string(hide_password=False)
    data_dir.mkdir()
    arguments = [url, str(data_dir), engine.url, "30"]
    with forked(retrain_process.main_training_here, arguments, data_dir / "log") as process:
        yield process


def wait_until(condition: Callable[[], bool], process: subprocess.Popen[Any] | ForkedProcess) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert process.poll() is None, "the retraining ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.02)


def newest_run(drifted: Drifted) -> RetrainRun:
    with drifted.database.session() as session:
        return retrain_runs.list_page(session, limit=1)[0]


def is_training(drifted: Drifted) -> bool:
    with drifted.database.session() as session:
        return any(run.progress for run in retrain_runs.list_page(session, limit=1))


def kill(process: subprocess.Popen[bytes] | ForkedProcess, drifted: Drifted) -> None:
    process.kill()
    process.wait()
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:  # the server notices the broken connection, and the lock is free
        with drifted.database.session() as session:
            if not retrain_runs.is_running(session, "engine-1", "target"):
                return
        assert time.monotonic() < deadline
        time.sleep(0.02)


def next_run(drifted: Drifted, data_dir: Path, engine: EngineStub) -> None:
    """One that has nothing to do by itself: what it changes is what it settles."""
    settings: Settings = make_settings(data_dir, engine.url, minimum_requests=10_000, aim_requests=10_000)
    assert retrain(drifted.database, settings).state == "nothing_to_do"


def state_of_draft(drifted: Drifted, version: str) -> str:
    with drifted.database.session() as session:
        draft = drafts.find(session, "engine-1", "target", version)
    assert draft is not None
    return draft.state


@pytest.mark.slow
def test_killed_while_training(drifted: Drifted, engine: EngineStub, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    process = start(drifted, data_dir, engine)
    wait_until(lambda: is_training(drifted), process)
    family = psutil.Process(process.pid).children(recursive=True)
    assert any("driftguard_training" in " ".join(child.cmdline()) for child in family)
    kill(process, drifted)
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_SECONDS)
    assert alive == [], "the training outlived the retraining that started it"
    killed = newest_run(drifted)
    assert killed.state == "training"
    assert (data_dir / "retraining" / str(killed.id) / "train.jsonl").exists()

    next_run(drifted, data_dir, engine)
    with drifted.database.session() as session:
        run = retrain_runs.find(session, killed.id)
        curve = retrain_runs.curve_of(session, killed.id)
    assert run is not None
    assert curve is not None
    assert curve.training.points[0].step == 10  # what was reported before the kill
    assert (run.state, run.ended_at is not None) == ("failed", True)
    assert run.reason == f"interrupted while training; draft {drifted.parent} is in service"
    assert engine.calls == []
    assert list((data_dir / "retraining").iterdir()) == []
    assert list((data_dir / "drafts").iterdir()) == []
    assert incident_states(drifted.database, drifted.incident_id) == ["open", "mitigating", "open"]


def test_killed_between_load_and_activate(drifted: Drifted, engine: EngineStub, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    engine.hold = "load"
    with forked_run(drifted, data_dir, engine) as process:
        wait_until(engine.held.is_set, process)
        kill(process, drifted)
    engine.release.set()
    assert newest_run(drifted).state == "promoting"

    killed = newest_run(drifted).id
    next_run(drifted, data_dir, engine)
    assert engine.calls == ["load"]
    assert engine.serving["version"] == drifted.parent
    with drifted.database.session() as session:
        run = retrain_runs.find(session, killed)
    assert run is not None
    assert run.state == "failed"
    assert state_of_draft(drifted, drifted.parent) == "in_service"
    assert state_of_draft(drifted, run.candidate_version or "") == "candidate"


def test_killed_between_activate_and_commit(drifted: Drifted, engine: EngineStub, tmp_path: Path) -> None:
    data_dir = tmp_path / "data"
    engine.hold = "activate"
    with forked_run(drifted, data_dir, engine) as process:
        wait_until(engine.held.is_set, process)
        kill(process, drifted)
    engine.release.set()
    killed = newest_run(drifted)
    assert killed.state == "promoting"
    assert engine.serving["version"] == killed.candidate_version
    assert state_of_draft(drifted, drifted.parent) == "in_service"  # the database has not heard of it

    next_run_settles = retrain(drifted.database, make_settings(data_dir, engine.url))
    assert "no incident calls for it" in next_run_settles.reason
    with drifted.database.session() as session:
        run = retrain_runs.find(session, killed.id)
    assert run is not None
    assert run.state == "watching"
    assert run.numbers is not None
    assert run.numbers.gate is not None
    assert run.numbers.gate.promote
    assert retrain_runs.watch_of(run).segments[1].old.segment == "german"
    assert state_of_draft(drifted, drifted.parent) == "retired"
    assert state_of_draft(drifted, killed.candidate_version or "") == "in_service"
    assert Path(engine.serving["directory"]).is_dir()


def test_killed_while_training_beside_an_engine_that_is_away(
    drifted: Drifted, engine: EngineStub, tmp_path: Path
) -> None:
    """What serves was not touched, so nobody has to be asked."""
    settings = make_settings(tmp_path / "data", f"http://127.0.0.1:{free_port()}")
    killed = trained(drifted.database, drifted.incident_id, drifted.parent, "new", "/new", "evaluating")
    traffic = settings.data_directory / "retraining" / str(killed.id) / "train.jsonl"
    traffic.parent.mkdir(parents=True)
    traffic.write_text("{}\n")
    candidate = settings.data_directory / "drafts" / str(killed.id) / "candidate"
    candidate.mkdir(parents=True)
    jobs = RetrainingJobs(drifted.database, settings)
    with capture_logs() as logs:
        with retrain_runs.try_lock(drifted.database, "engine-1", "target"):
            jobs.settle("engine-1")  # it lives
        assert newest_run(drifted).state == "evaluating"
        for _ in range(3):
            jobs.settle("engine-1")
    run = newest_run(drifted)
    assert (run.state, run.reason) == (
        "failed",
        "interrupted while evaluating; the draft in service is as it was",
    )
    assert not traffic.exists()
    assert not candidate.parent.exists()
    assert incident_states(drifted.database, drifted.incident_id) == ["open", "mitigating", "open"]
    assert len([line for line in logs if line["event"] == "cannot settle yet"]) == 1


@pytest.mark.parametrize("state", ["training", "promoting"])
def test_killed_beside_an_engine_that_is_started_again_without_speculation(
    drifted: Drifted, engine: EngineStub, tmp_path: Path, state: str
) -> None:
    """It may stay so for weeks. What it would serve is unknown, but a training had not touched that."""
    settings = make_settings(tmp_path / "data", engine.url)
    killed = trained(drifted.database, drifted.incident_id, drifted.parent, "new", "/new", state)
    traffic = settings.data_directory / "retraining" / str(killed.id) / "train.jsonl"
    traffic.parent.mkdir(parents=True)
    traffic.write_text("{}\n")
    engine.serving = {"name": "none", "version": "none", "method": "none", "directory": None}
    jobs = RetrainingJobs(drifted.database, settings)
    with capture_logs() as logs:
        for _ in range(3):  # every two seconds
            jobs.settle("engine-1")
    is_over = state == "training"
    assert newest_run(drifted).state == ("failed" if is_over else state)
    assert traffic.exists() != is_over
    told = [
        (line["event"], line.get("reason"))
        for line in logs
        if line["event"] != "interrupted retraining found"
    ]
    assert told == [
        ("cannot settle yet", "engine-1 serves without speculation: which draft it would serve is unknown")
    ]


@pytest.mark.parametrize("state", ["training", "promoting", "watching"])
def test_killed_for_a_target_that_was_replaced_before_anybody_looked(
    drifted: Drifted, engine: EngineStub, tmp_path: Path, state: str
) -> None:
    """As by an update of a night, of the sidecar and of the model."""
    settings = make_settings(tmp_path / "data", engine.url)
    killed = trained(drifted.database, drifted.incident_id, drifted.parent, "new", "/new", state)
    if state == "watching":
        with drifted.database.session() as session:
            watch = Watch((), (), 0.05, 0, 0, recovered=False, verdict="watching")
            retrain_runs.advance(session, killed.id, "watching", numbers=RunNumbers(watch=watch))
    traffic = settings.data_directory / "retraining" / str(killed.id) / "train.jsonl"
    traffic.parent.mkdir(parents=True)
    traffic.write_text("{}\n")
    engine.target_name = "another"
    jobs = RetrainingJobs(drifted.database, settings)
    with retrain_runs.try_lock(drifted.database, "engine-1", "target"):
        jobs.settle("engine-1")
        if state != "watching":  # it lives
            assert newest_run(drifted).state == state
            assert traffic.exists()
    jobs.settle("engine-1")
    run = newest_run(drifted)
    if state == "watching":
        told = "promoted", "promoted; no longer watched, because target another is served now"
    else:
        told = "failed", f"interrupted while {state}; target another is served now"
    assert (run.state, run.reason) == told
    assert not traffic.exists()
    assert incident_states(drifted.database, drifted.incident_id) == ["open", "mitigating", "open"]


@pytest.mark.slow
@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 1)])
def test_a_nightly_job_that_is_ended_leaves_nothing_behind(
    drifted: Drifted, engine: EngineStub, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    """By Ctrl-C, or by systemd, cron's container or a time limit."""
    config = tmp_path / "driftguard.toml"
    config.write_text(
        f"""
data_dir = "{tmp_path / "data"}"
[capture]
enabled = true
[[engines]]
server = "engine-1"
admin_url = "{engine.url}"
[retraining]
minimum_requests = 128
aim_requests = 128
steps = 1000000
threads = 1
"""
    )
    url = drifted.database.url.render_as_string(hide_password=False)
    with subprocess.Popen(
        [sys.executable, "-m", "driftguard", "retrain", "--config", str(config)],
        env={**os.environ, "DRIFTGUARD_DATABASE_URL": url},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        wait_until(lambda: is_training(drifted), process)
        process.send_signal(number)
        told, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert (process.returncode, told.splitlines()[-1], errors) == (code, "failed: stopped on request", "")
    run = newest_run(drifted)
    assert (run.state, run.reason) == ("failed", "stopped on request")
    assert list((tmp_path / "data" / "retraining").iterdir()) == []
    assert incident_states(drifted.database, drifted.incident_id) == ["open", "mitigating", "open"]
