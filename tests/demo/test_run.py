"""How the demo begins and ends; what it shows in between, `make demo` shows."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from rich.console import Console

import driftguard.demo.run
from driftguard.demo import sidecar_client
from driftguard.demo.processes import DemoFailed, Process, free_url, sidecar_config
from driftguard.demo.run import DemoOptions, run_demo
from driftguard.demo.sidecar_client import SidecarClient, wait_for
from driftguard.demo.stages import Facts, Loop, drift
from driftguard.demo.stopping import ENDING
from driftguard.demo.traffic import Answer, Traffic
from driftguard.demo.view import Screen, Stage
from driftguard.errors import BadInput
from driftguard.incident_lifecycle import severity
from driftguard.settings.loading import load_settings
from tests.conftest import PATIENCE_SECONDS
from tests.sources.served import ok, served


def options(
    *, json_file: Path | None = None, alertmanager: str | None = None, log_directory: Path | None = None
) -> DemoOptions:
    return DemoOptions(json_file, alertmanager, keep=False, seed=0, log_directory=log_directory)


def test_what_would_fail_at_the_end_is_refused_at_the_start(tmp_path: Path) -> None:
    nowhere = tmp_path / "missing" / "facts.json"
    with pytest.raises(BadInput, match=r"--json: .*facts\.json cannot be written: No such file"):
        run_demo(options(json_file=nowhere))
    url = free_url()
    with pytest.raises(BadInput, match=f"--alertmanager: no Alertmanager answers at {url}: .*refused"):
        run_demo(options(alertmanager=url))
    (tmp_path / "file").touch()
    with pytest.raises(BadInput, match=r"--log-dir: .*file is not a directory"):
        run_demo(options(log_directory=tmp_path / "file"))


def test_an_earlier_demo_is_not_continued(tmp_path: Path) -> None:
    """Its incidents and baselines would be taken for those of the new one."""
    (tmp_path / "data").mkdir()
    with pytest.raises(BadInput, match=r"--log-dir: .* holds an earlier demo"):
        run_demo(options(log_directory=tmp_path))


@pytest.mark.parametrize("is_kept", [True, False])
def test_a_demo_that_fails_says_where_its_logs_are_or_how_to_keep_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *, is_kept: bool
) -> None:
    def fails(*_: object) -> Process:
        raise DemoFailed("the sidecar ended with code 1")

    handlers = {number: signal.getsignal(number) for number in ENDING}
    monkeypatch.setattr(driftguard.demo.run, "start_sidecar", fails)
    try:
        code = run_demo(options(log_directory=tmp_path if is_kept else None))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert code == 1
    told = capsys.readouterr().out
    assert "the sidecar ended with code 1" in told
    kept, not_kept = f"The logs of engine and sidecar are in {tmp_path}", "With --log-dir DIRECTORY"
    assert (kept in told, not_kept in told) == (is_kept, not is_kept)


def test_a_fall_after_which_answers_came_no_slower_is_paged(tmp_path: Path) -> None:
    """As on a machine that other work leaves meanwhile: the demo would wait for its page in vain."""
    file = tmp_path / "driftguard.toml"
    file.write_text(sidecar_config(tmp_path, "http://engine:1", "http://sidecar:1", ["http://pager:1"], []))
    assert severity("down", -0.1, load_settings(file).alerting.page_slowdown) == "warning"


def test_what_goes_on_slowly_is_waited_for_and_what_stands_still_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(sidecar_client, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    assert wait_for("it", 10.0, lambda: "done" if now >= 50.0 else None, lambda: now / 100.0) == "done"
    now = 0.0
    with pytest.raises(DemoFailed, match="it did not happen within 10 s, 20% of it done"):
        wait_for("it", 10.0, lambda: None, lambda: min(now / 100.0, 0.2))


def test_canary_probes_are_no_requests_that_the_alarm_took() -> None:
    """They are numbered with the requests: 24 of them were told as a delay."""
    kinds = ["request"] * 10 + ["probe"] * 24 + ["request"] * 30
    lines = "".join(json.dumps({"kind": kind}) + "\n" for kind in kinds)
    incident = {
        "id": "1", "direction": "down", "diagnosis": {}, "summary": "acceptance fell",
        "segments": [{"segment": "code"}], "since": "2026-11-30T09:05:53Z",
        "change_point_record": 46, "opened_record": 59,
    }  # fmt: skip
    pages = {
        "/api/v1/incidents": ok(lambda: json.dumps({"incidents": [incident]})),
        "/api/v1/records?format=jsonl": ok(lambda: lines),
    }
    answers = [Answer(0.0, "code", "known", 1, 1, 1)] * 20
    with served(pages) as sidecar:
        loop = Loop(
            screen=Screen(Console(file=io.StringIO())),
            traffic=cast("Traffic", SimpleNamespace(load=None, answers=answers)),
            sidecar=SidecarClient(sidecar.url),
            receiver=None,
            alertmanager_url=None,
            facts=Facts(seed=0),
        )
        stage = Stage("drift", "Shift")
        facts = drift(loop, stage)
    assert (facts["delay_requests"], facts["change_point_error_requests"]) == (15, 2)
    assert "in code, 15 requests after the shift" in stage.note


SERVING = ("driftguard serve", "--drafter", "bin/postgres")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signals", "method", "phase"),
    [
        ([signal.SIGHUP], "draft_model", ("driftguard serve",)),
        ([signal.SIGTERM], "draft_model", ("initdb",)),
        ([signal.SIGINT, signal.SIGINT, signal.SIGTERM], "eagle3", SERVING),
    ],
    ids=["terminal closed at the first process", "while the database is made", "again and again"],
)
def test_a_demo_has_a_database_of_its_own_and_leaves_nothing_running(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    signals: list[signal.Signals],
    method: str,
    phase: tuple[str, ...],
) -> None:
    monkeypatch.setenv("DRIFTGUARD_DATABASE_URL", "postgresql://127.0.0.1:9/of_the_user")
    command = [sys.executable, "-m", "driftguard", "demo", "--log-dir", str(tmp_path), "--method", method]
    demo = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        wait_until_running(tmp_path, *phase)
        for number in signals:
            demo.send_signal(number)
            time.sleep(0.3)
        code = demo.wait(PATIENCE_SECONDS)
        assert running(tmp_path) == {}
        assert code == 128 + signals[0]
    finally:
        demo.kill()
        for process_id in running(tmp_path):
            os.kill(process_id, signal.SIGKILL)


def running(directory: Path) -> dict[int, str]:
    """Process id -> command line that names the directory; without the demo itself."""
    listed = subprocess.run(["ps", "-ewwo", "pid=,args="], capture_output=True, check=True, text=True).stdout
    lines = [line.split(maxsplit=1) for line in listed.splitlines() if str(directory) in line]
    return {int(process_id): args for process_id, args in lines if "--log-dir" not in args}


def wait_until_running(directory: Path, *names: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        lines = running(directory).values()
        if all(any(name in line for line in lines) for name in names):
            return
        time.sleep(0.02)
    pytest.fail(f"not running: {names}, but {running(directory)}")
