"""Every command of every runbook, as it is pasted, against real servers and a real incident."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from pathlib import Path
from textwrap import dedent

import httpx
import pytest
from driftguard_engine.core import DraftInfo
from driftguard_engine.server.app import ServeOptions
from driftguard_engine.server.auth import hash_of

from driftguard.pipeline.held import VERSION
from driftguard.store.database import Database
from driftguard.store.tables import HeldStream
from tests.alerting.http_receiver import wait_until
from tests.alerting.incident_rows import add_incident, add_stream
from tests.alerts.committed import RUNBOOKS
from tests.engine.server.fake_engine import FakeEngine
from tests.engine.server.serving import served
from tests.engine.server.tiny_models import byte_tokenizer
from tests.integration.committed_config import committed_alertmanager, hastened_rules
from tests.integration.conftest import BAD, GOOD, TIMES
from tests.integration.servers import (
    needs_alertmanager,
    needs_prometheus,
    running_alertmanager,
    running_prometheus,
)
from tests.pipeline.sidecar import post, running_sidecar
from tests.pipeline.traffic import Traffic

MISSING = [name for name in ("bash", "curl", "jq", "psql", "amtool") if shutil.which(name) is None]
pytestmark = [
    pytest.mark.slow,
    needs_prometheus,
    needs_alertmanager,
    pytest.mark.skipif(bool(MISSING), reason=f"not installed: {', '.join(MISSING)}"),
]
PRELUDE = """
set -eo pipefail
curl() { command curl --fail-with-body "$@"; }
driftguard() { "$PYTHON" -m driftguard "$@"; }
"""
# About the machine of the sidecar, which here has no units and no cluster: only read by the shell.
OF_THE_MACHINE = ("journalctl", "systemctl", "kubectl", "grep")
# Nothing was captured, so that a retraining has nothing to do; and no draft was promoted.
ENDS = {"driftguard retrain": 3, "/rollback": 22, "drafts rollback": 1}
DECISIONS = ("/acknowledge", "incidents acknowledge", "/resolve", "incidents resolve")
SERVER = "test"  # as the fake engine calls itself
KEY = 16 * "0a1b"  # as in a container, where the engine asks for one


class OneDraft(FakeEngine):
    """It has loaded the only draft that it is asked for."""

    def load_draft(self, directory: str, version: str | None = None) -> DraftInfo:
        assert version == self.draft.version
        return self.draft

    def swap_draft(self, version: str) -> DraftInfo:
        return self.load_draft("", version)


def commands() -> dict[str, list[str]]:
    """Command -> the runbooks that have it."""
    found: dict[str, list[str]] = {}
    for alert, file in RUNBOOKS.items():
        text = file.read_text(encoding="utf-8")
        for block in re.findall(r"^ *```sh\n(.*?)^ *```$", text, re.MULTILINE | re.DOTALL):
            for command in re.split(r"(?<!\\)\n", dedent(block).strip()):
                found.setdefault(command, []).append(alert)
    return found


def run(command: str, variables: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", PRELUDE + command],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.fixture
def variables(
    database: Database, database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, str]]:
    """What the runbooks tell to set, and the settings of the commands."""
    monkeypatch.setenv("DRIFTGUARD_PROBES__PAUSE_SECONDS", "0")  # else `probe run` meets the sidecar's replay
    for name in ("sidecar", "prometheus", "alertmanager"):
        (tmp_path / name).mkdir()
    with ExitStack() as stack:
        asking = ServeOptions(admin_key_hash=hash_of(KEY), shutdown_limit_seconds=5)
        serving = stack.enter_context(served(OneDraft(byte_tokenizer()), options=asking))
        engine = str(serving.base_url).rstrip("/")
        engines = [{"server": SERVER, "admin_url": engine, "api_key": KEY}]
        sidecar = stack.enter_context(running_sidecar(database, tmp_path / "sidecar", engines=engines))
        traffic = Traffic(seed=33, start=datetime.now(UTC) - timedelta(minutes=5), seconds_apart=0.09)
        post(sidecar, traffic.draw(1500, GOOD, server=SERVER))
        post(sidecar, traffic.draw(300, BAD, server=SERVER))
        wait_until(lambda: bool(unresolved(sidecar)), "the incident")
        base = str(sidecar.base_url).rstrip("/")
        alertmanager = stack.enter_context(
            running_alertmanager(tmp_path / "alertmanager", committed_alertmanager("http://127.0.0.1:9"))
        )
        prometheus = stack.enter_context(
            running_prometheus(tmp_path / "prometheus", [base], hastened_rules(TIMES), [alertmanager])
        )
        wait_until(lambda: bool(prometheus.firing("DriftGuardWatchdog")), "the watchdog")
        yield {
            "SIDECAR": base,
            "ENGINE": engine,
            "PROMETHEUS": prometheus.url,
            "ALERTMANAGER": alertmanager,
            "INCIDENT": unresolved(sidecar)[0],
            "SERVER": SERVER,
            "DRAFT": "v1",
            "DIRECTORY": str(tmp_path),
            "DRIFTGUARD_API_KEY": KEY,
            "DRIFTGUARD_DATABASE_URL": database_url.replace("postgresql+psycopg", "postgresql"),
            "DRIFTGUARD_ENGINES": json.dumps(engines),
            "DRIFTGUARD_DATA_DIR": str(tmp_path),
            "DRIFTGUARD_PORT": str(sidecar.base_url.port),
            "PYTHON": sys.executable,
        }


def unresolved(sidecar: httpx.Client) -> list[str]:
    listed = sidecar.get("/api/v1/incidents?state=unresolved").json()["incidents"]
    return [incident["id"] for incident in listed]


def hold(database: Database) -> str:
    """The id of a stream that the detector has failed at and set aside, as far as the database knows."""
    stream_id, now = add_stream(database, "v2"), datetime.now(UTC)
    with database.session() as session:
        session.add(
            HeldStream(
                stream_id=stream_id,
                after_seq=0,
                records_behind=0,
                failures=5,
                reason="of the test",
                version=VERSION,
                since=now,
                next_try_at=None,
                set_aside_at=now,
            )
        )
    return str(stream_id)


def test_every_command_of_every_runbook_works_as_pasted(
    variables: dict[str, str], database: Database
) -> None:
    variables["STREAM"] = hold(database)
    accepted = variables["INCIDENT"]
    said: dict[str, str] = {}
    for command, alerts in commands().items():
        where = f"{command}\n({', '.join(alerts)})"
        assert set(re.findall(r"\$(\w+)", command)) <= variables.keys(), where
        if command.startswith(OF_THE_MACHINE):
            subprocess.run(["bash", "-n", "-c", command], check=True)
            continue
        decides = any(part in command for part in DECISIONS)
        of_its_own = {}
        if decides:
            stream_id = add_stream(database, f"decided-{len(said)}")
            of_its_own["INCIDENT"] = str(add_incident(database, [], stream_id=stream_id))
        done = run(command, variables | of_its_own)
        while "is queued already" in done.stdout:  # by the command before
            time.sleep(0.1)
            done = run(command, variables | of_its_own)
        said[command] = done.stdout + done.stderr
        code = next((code for part, code in ENDS.items() if part in command), 0)
        assert done.returncode == code, f"{where}\n{done.stdout}\n{done.stderr}"
    assert set(said) == {command for command in commands() if not command.startswith(OF_THE_MACHINE)}

    def answer(part: str) -> str:
        (found,) = (text for command, text in said.items() if part in command)
        return found

    assert accepted in answer("incidents?state=unresolved")
    assert accepted in answer("incidents list --state unresolved")
    assert answer("/acknowledge") == '"acknowledged"\n'
    assert " is acknowledged\n" in answer("incidents acknowledge")
    assert answer("/resolve") == '"resolved"\n'
    assert " is resolved\n" in answer("incidents resolve")
    assert f"{accepted} is resolved" in answer("incidents accept")
    assert "draft v1 was not promoted here" in answer("/rollback")
    assert "draft v1 was not promoted here" in answer("drafts rollback")
    assert "queued as job" in answer("runs start")
    assert f"sidecar: ready at {variables['SIDECAR']}" in said["driftguard doctor"]
    assert "of the test" in answer("from held_streams")
    assert "read again within seconds" in answer("streams retry")
    assert "probes replayed on test" in answer("probe run")
    assert "DriftGuardWatchdog" in answer("amtool alert query")
    assert answer("amtool config routes") == "dead-mans-switch\n"
    assert '"health": "up"' in answer("api/v1/targets")
