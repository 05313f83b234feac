"""Runs the measurement of the loop: another process goes on where one has died."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.gpu.check.loop import results
from tests.gpu.check.loop.results import LoopMeasured

ROOT = Path(__file__).parents[4]
DEVICE_LOST = 3  # status of a process after which another one has to go on
SLACK_SECONDS = 30.0  # for the part that runs when the time is over


def measure(extent: str, seconds: float, say: Callable[[str], None]) -> LoopMeasured:
    """In `seconds` and a little more. A part that ends its process has failed, and the next one is tried."""
    end = time.monotonic() + seconds
    with TemporaryDirectory(prefix="driftguard-loop-") as kept:
        state = Path(kept) / "measured"
        while True:
            ending = _run(state, extent, max(0.0, end - time.monotonic()), say)
            found = results.read(state)
            if ending is None:
                return found
            broken = found.running
            if broken is not None:
                found.failures.append(f"{broken}: {ending}")
                found.settled.append(broken)
                found.running = None
                found.save(state)
            elif not ending.endswith(f"status {DEVICE_LOST}"):
                found.failures.append(f"nothing more was measured: {ending}")
                return found


def _run(state: Path, extent: str, seconds: float, say: Callable[[str], None]) -> str | None:
    """How its process ended; None: as it should."""
    command = [sys.executable, "-m", "tests.gpu.check.loop", "--state", str(state)]
    command += ["--extent", extent, "--seconds", f"{seconds:.0f}"]
    say(f"loop: {' '.join(command[1:])}")
    environment = os.environ | {"PYTHONUNBUFFERED": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        status = subprocess.run(
            command, cwd=ROOT, env=environment, timeout=seconds + SLACK_SECONDS, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return f"stopped after {seconds + SLACK_SECONDS:.0f} s"
    return None if status == 0 else f"its process ended with status {status}"
