"""How a command ends whose starter wants it to."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
import pytest

from driftguard.retraining.training import child_process
from driftguard.retraining.training.child_process import tethered
from tests.alerting.http_receiver import wait_until


def end_once_it_runs(on_terminate: str, directory: Path) -> psutil.Process:
    """The process of a command that ends only as `on_terminate`, a line of sh, says."""
    ready, script = directory / "pid", f"trap '{on_terminate}' TERM; echo $$ > pid.new; mv pid.new pid"
    command = ["sh", "-c", f"cd {directory}; {script}; while :; do sleep 0.05; done"]
    with tethered(command, subprocess.DEVNULL, subprocess.DEVNULL):
        wait_until(ready.exists, "the command to run")
        return psutil.Process(int(ready.read_text()))


def test_a_command_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a `promote_command` that took too long: it must not replace a draft after its run has failed."""
    monkeypatch.setattr(child_process, "_TERMINATE_SECONDS", 0.1)
    process = end_once_it_runs("", tmp_path)
    assert psutil.wait_procs([process], timeout=60)[1] == []


def test_a_command_has_time_to_clean_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child_process, "_TERMINATE_SECONDS", 60.0)
    process = end_once_it_runs("sleep 0.2; touch cleaned; exit 0", tmp_path)
    assert (tmp_path / "cleaned").exists()
    assert psutil.wait_procs([process], timeout=60)[1] == []
