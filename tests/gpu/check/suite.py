"""Runs tests/gpu in processes of their own: behind a test that ends its process or loses the device, the next
one goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.gpu.begun import ALL_RAN, BEGUN_TESTS

ROOT = Path(__file__).parents[3]
QUICK_DRAWS = 1_000_000
MOST_PROCESSES = 8
_NOTHING_TO_RUN = 5  # how pytest ends where all tests were deselected


def run(quick: bool, seconds: float, say: Callable[[str], None]) -> tuple[str, bool]:
    """What its processes told last, and whether anything failed."""
    end, failed = time.monotonic() + seconds, False
    outcomes: list[str] = []
    with TemporaryDirectory(prefix="driftguard-tests-") as kept:
        begun = Path(kept) / "begun"
        begun.touch()
        for _ in range(MOST_PROCESSES):
            before = begun.read_text(encoding="utf-8")
            told, status = _watched(_command(quick), begun, end - time.monotonic(), say)
            now = begun.read_text(encoding="utf-8")
            if status != _NOTHING_TO_RUN or not outcomes:  # where the last test broke its process
                outcomes.append(told)
                failed |= status != 0
            if now.endswith(f"{ALL_RAN}\n") or now == before or time.monotonic() > end:
                break
    return "; then ".join(outcomes), failed


def _command(quick: bool) -> list[str]:
    draws = ["--draws", str(QUICK_DRAWS)] if quick else []
    # The options of pyproject.toml and the fixtures of tests/conftest.py need packages of the sidecar.
    alone = ["-c", os.devnull, "--rootdir", str(ROOT), "--confcutdir", "tests/gpu", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "tests/gpu", *alone, "-v", "-rfE", "--tb=short", *draws]
    return [*command, "-o", "markers=gpu: needs a CUDA device", "--durations=8"]


def _watched(command: list[str], begun: Path, seconds: float, say: Callable[[str], None]) -> tuple[str, int]:
    """The last line that it printed, or the test that ended it, and its exit status."""
    say(f"tests: {' '.join(command[1:])}")
    at, last, stopped, late = "", "", "", threading.Event()
    environment = os.environ | {"PYTHONUNBUFFERED": "1", BEGUN_TESTS: str(begun)}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:

        def stop() -> None:
            late.set()
            process.kill()

        limit = threading.Timer(seconds, stop)
        limit.start()
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            last = line.strip("= \n") or last
            stopped = ", " + line.strip("! \n") if line.startswith("!") else stopped
            at = last.split(" ")[0] if "::" in last.split(" ")[0] else at  # the test that runs
        status = process.wait()
        limit.cancel()
    if late.is_set():
        return f"stopped after {seconds:.0f} s, at: {at}", status
    if status < 0:
        return f"ended by {signal.Signals(-status).name}, at: {at}", status
    return last + stopped, status
