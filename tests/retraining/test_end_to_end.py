"""The loop with nothing stood in for: engine, training, database and the HTTP between them are real."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import httpx
import pytest
from driftguard_training.model_directories import model_version

from driftguard.retraining.run import retrain
from driftguard.store import drafts, retrain_runs
from driftguard.store.database import Database
from tests.retraining.world import NEW, OLD, Models, capture, drift, make_settings, requests_of

pytestmark = pytest.mark.slow


@contextmanager
def real_engine(models: Models, log: Path) -> Iterator[str]:
    """The address of `driftguard engine` as a process."""
    command = [sys.executable, "-m", "driftguard_engine", "--target", str(models.target)]
    command += ["--draft", str(models.draft), "--server-name", "engine-1", "--port", "0", "--threads", "1"]
    with log.open("wb") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        yield _address(process, log)
    finally:
        process.terminate()
        process.communicate(timeout=60)


def _address(process: subprocess.Popen[str], log: Path) -> str:
    assert process.stdout is not None
    for line in process.stdout:
        if found := re.search(r"http://127\.0\.0\.1:\d+", line):
            return found.group()
    raise AssertionError(f"the engine did not start: {log.read_text()}")


def complete(address: str) -> dict[str, Any]:
    """One greedy request; its answer with the engine's own counts."""
    body = {"model": "target", "prompt": "t3 t4 t5", "max_tokens": 16, "temperature": 0, "ignore_eos": True}
    answer = httpx.post(f"{address}/v1/completions", json=body, timeout=60)
    assert answer.status_code == 200, answer.text
    decoded: dict[str, Any] = answer.json()
    return decoded


def test_a_drift_ends_with_a_better_draft_in_service(
    database: Database, models: Models, tmp_path: Path
) -> None:
    parent = model_version(models.draft)
    changed_at = datetime.now(UTC) - timedelta(minutes=5)
    incident_id = drift(database, parent, changed_at)
    capture(database, parent, OLD, requests_of(models.old_traffic), changed_at - timedelta(minutes=2))
    capture(database, parent, NEW, requests_of(models.new_traffic), changed_at + timedelta(seconds=1))
    with real_engine(models, tmp_path / "engine.log") as address:
        before = complete(address)
        settings = make_settings(tmp_path / "data", address)
        outcome = retrain(database, settings, trigger="incident", incident_id=incident_id)
        assert outcome.state == "promoted", outcome.reason
        after = complete(address)
        info = httpx.get(f"{address}/admin/info").json()

    with database.session() as session:
        assert outcome.run_id is not None
        run = retrain_runs.find(session, outcome.run_id)
        serving = drafts.in_service(session, "engine-1", "target")
    assert run is not None
    assert serving is not None
    assert info["draft"]["version"] == serving.version == run.candidate_version != parent
    assert Path(info["draft"]["directory"]) == tmp_path / "data" / "drafts" / serving.version
    # The target decides: another draft changes the speed, never the text.
    assert after["choices"][0]["text"] == before["choices"][0]["text"]
