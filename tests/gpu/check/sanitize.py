"""Memory and race checks by compute-sanitizer, where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

from tests.gpu.check.rows import Checked
from tests.gpu.check.run import Run

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
FOUND_SOMETHING = 99
PLACES = ["/usr/local/cuda/bin"]  # where toolkits are, besides PATH
NOT_AVAILABLE = "not available: compute-sanitizer is neither on PATH nor in CUDA's directory"


def sanitizers(run: Run) -> None:
    path = os.pathsep.join([os.environ.get("PATH", ""), *PLACES])
    program = shutil.which("compute-sanitizer", path=path)
    if program is None:
        outcomes = [(NOT_AVAILABLE, False)] * len(TOOLS)
    else:  # at the same time: what they wait for is their own instrumentation, on the host
        with ThreadPoolExecutor() as together:
            outcomes = list(together.map(lambda tool: _one(program, tool, run.seconds_left), TOOLS))
    for tool, (outcome, failed) in zip(TOOLS, outcomes, strict=True):
        run.add(Checked(f"compute-sanitizer {tool}", outcome, failed))
        run.say(f"{tool}: {outcome}")


def _one(program: str, tool: str, seconds: float) -> tuple[str, bool]:
    command = [program, "--tool", tool, "--error-exitcode", str(FOUND_SOMETHING), "--report-api-errors", "no"]
    # One allocation for each tensor: inside torch's large blocks no access is out of bounds.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    try:
        done = subprocess.run(
            [*command, sys.executable, "-m", "tests.gpu.check.sanitized"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=max(1.0, seconds),
            check=False,
        )
    except subprocess.TimeoutExpired as late:
        return f"not finished in {late.timeout:.0f} s", False
    if done.returncode == 0:
        return "nothing found", False
    tail = " / ".join((done.stdout + done.stderr).strip().splitlines()[-6:])
    if done.returncode == FOUND_SOMETHING:
        return f"found something: {tail}", True
    # The tool refuses some devices and virtual machines, which says nothing about the kernels.
    return f"not available: it ended with status {done.returncode}: {tail}", False
