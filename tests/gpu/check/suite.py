"""Runs tests/gpu in processes of their own: behind a test that ends its process or loses the device, the next
one goes on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.gpu.begun import ALL_RAN, BEGUN_TESTS
from tests.gpu.check.rows import Checked
from tests.gpu.check.run import Run

ROOT = Path(__file__).parents[3]
DRAWS, FEW_DRAWS = 30_000_000, 1_000_000
MOST_PROCESSES = 8
_EQUALITY, _LOSSLESSNESS = "tests/gpu/test_equal_to_reference.py", "tests/gpu/test_losslessness.py"
_OF_THE_CHECK = ("tests/gpu/test_check.py", "tests/gpu/test_loop_check.py")  # without a device
_NOTHING_TO_RUN = 5  # how pytest ends where all tests were deselected


def equality(run: Run) -> None:
    """Kernels and reference, bit for bit."""
    _run(run, [_EQUALITY])


def tests(run: Run) -> None:
    """All tests of the device but `equality`, with few draws."""
    ignored = [f"--ignore={path}" for path in (_EQUALITY, *_OF_THE_CHECK)]
    _run(run, ["tests/gpu", *ignored, "--draws", str(FEW_DRAWS)])


def draws(run: Run) -> None:
    _run(run, [_LOSSLESSNESS, "--draws", str(DRAWS)])


def _run(run: Run, chosen: Sequence[str]) -> None:
    outcome, failed = run_tests(chosen, run.seconds_left, run.say)
    run.add(Checked(" ".join(chosen), outcome, failed))


def run_tests(chosen: Sequence[str], seconds: float, say: Callable[[str], None]) -> tuple[str, bool]:
    """What its processes told last, and whether anything failed."""
    end, failed = time.monotonic() + seconds, False
    outcomes: list[str] = []
    with TemporaryDirectory(prefix="driftguard-tests-") as kept:
        begun = Path(kept) / "begun"
        begun.touch()
        for _ in range(MOST_PROCESSES):
            before = begun.read_text(encoding="utf-8")
            told, status = _watched(_command(chosen), begun, end - time.monotonic(), say)
            now = begun.read_text(encoding="utf-8")
            if status != _NOTHING_TO_RUN or not outcomes:  # where the last test broke its process
                outcomes.append(told)
                failed |= status != 0
            if now.endswith(f"{ALL_RAN}\n") or now == before or time.monotonic() > end:
                break
    return "; then ".join(outcomes), failed


def _command(chosen: Sequence[str]) -> list[str]:
    # The options of pyproject.toml and the fixtures of tests/conftest.py need packages of the sidecar.
    alone = ["-c", os.devnull, "--rootdir", str(ROOT), "--confcutdir", "tests/gpu", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *chosen, *alone, "-v", "-rfE", "--tb=short"]
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
