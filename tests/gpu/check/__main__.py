"""Builds, tests and measures the engine's CUDA kernels and loop on the GPU of this machine: `make gpu-check`.

    PYTHONPATH=.:engine:engine/training python -m tests.gpu.check [--quick] [--only loop] [--no-write]

Needs Python 3.11 or newer with torch, transformers, numpy, scipy, pytest and cuda-bindings; installs nothing.
Exit status: 0 all tests passed, 1 one failed, 2 nothing could be checked here.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
from driftguard_engine.kernels.compiler import KernelsUnavailable
from driftguard_engine.kernels.launching import LaunchFailed

from tests.gpu.check import benchmarks, building, machine, report, sanitize
from tests.gpu.check.loop import running
from tests.gpu.check.report import Findings

ROOT = Path(__file__).parents[3]
SECONDS = 780.0  # for everything
SECONDS_FOR_TESTS = 260.0
SECONDS_FOR_BENCHMARKS = 150.0
SECONDS_FOR_LOOP = 240.0
QUICK_DRAWS = 1_000_000

_started = time.monotonic()


def main() -> int:
    options = _options()
    end = _started + options.seconds
    try:
        found_machine = machine.find()
    except machine.NoDevice as nothing:
        print(nothing, file=sys.stderr)
        return 2
    findings, failed = Findings(found_machine.lines(), quick=options.quick), False
    for name, value in findings.machine:
        say(f"{name}: {value}")
    with tempfile.TemporaryDirectory(prefix="driftguard-kernels-") as cache:
        os.environ["DRIFTGUARD_CACHE_DIR"] = cache
        try:
            built = building.build(found_machine.device)
        except KernelsUnavailable as problem:
            findings.steps.append(("build", f"FAILED: {problem}"))
            return _finish(findings, found_machine, options, failed=True)
        _report_build(findings, built)
        if options.only in (None, "tests"):
            failed |= _test(findings, options.quick)
        if options.only in (None, "benchmarks"):
            failed |= _measure(findings, built, found_machine, options.quick, end)
        if options.only in (None, "loop"):
            failed |= _measure_loop(findings, options.quick, end)
        if options.only == "memory" or (options.only is None and not options.quick):
            for tool, outcome, is_failure in sanitize.run(lambda: end - time.monotonic(), say):
                findings.steps.append((f"compute-sanitizer {tool}", outcome))
                failed |= is_failure
    return _finish(findings, found_machine, options, failed)


def say(line: str) -> None:
    print(f"[{time.monotonic() - _started:5.0f} s] {line}", flush=True)


def _report_build(findings: Findings, built: building.Built) -> None:
    findings.resources = built.resources
    findings.build = (
        f"{built.first_start_seconds:.1f} s to compile and load at the first start,"
        f" {built.later_start_seconds:.2f} s from the cache"
    )
    say(f"build: {findings.build}")
    if not built.resources:
        say("  the compiler does not tell what the kernels take")
    for one in built.resources:
        say(
            f"  {one.kernel}: {one.registers} registers, {one.stack_bytes} bytes of stack,"
            f" {one.spill_bytes} spilled, {one.shared_bytes} shared"
        )


def _test(findings: Findings, quick: bool) -> bool:
    """Runs tests/gpu in a process of its own: what a kernel breaks there, it breaks there. True: failed."""
    draws = ["--draws", str(QUICK_DRAWS)] if quick else []
    # The options of pyproject.toml and the fixtures of tests/conftest.py need packages of the sidecar.
    alone = ["-c", os.devnull, "--rootdir", str(ROOT), "--confcutdir", "tests/gpu", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", "tests/gpu", *alone, "-v", "-rfE", "--tb=short", *draws]
    command += ["-o", "markers=gpu: needs a CUDA device", "--durations=8"]
    say(f"tests: {' '.join(command[1:])}")
    outcome, status = _watched(command)
    findings.steps.append(("tests/gpu", outcome if status == 0 else f"FAILED: {outcome}"))
    return status != 0


def _measure(
    findings: Findings, built: building.Built, found: machine.Machine, quick: bool, end: float
) -> bool:
    """True: something failed; what was measured before it stays."""
    own_end = min(time.monotonic() + SECONDS_FOR_BENCHMARKS, end)
    plan = benchmarks.Plan(built.kernels, found.l2_bytes, quick, lambda: time.monotonic() > own_end, say)
    try:
        benchmarks.run(plan, findings.measured)
    except (RuntimeError, LaunchFailed, KernelsUnavailable) as problem:  # torch's errors are RuntimeErrors
        findings.steps.append(("benchmarks", f"FAILED: {problem}"))
        say(f"benchmarks: {problem}")
        return True
    return False


def _measure_loop(findings: Findings, quick: bool, end: float) -> bool:
    """True: something failed."""
    torch.cuda.empty_cache()  # the loop's own process needs the memory
    seconds = min(SECONDS_FOR_LOOP, end - time.monotonic())
    found = running.measure("quick" if quick else "full", seconds, say)
    findings.measured.loop = found
    for failure in found.failures:
        findings.steps.append(("loop", f"FAILED: {failure}"))
    return bool(found.failures)


def _watched(command: list[str]) -> tuple[str, int]:
    """The last line that it printed, and its exit status."""
    last, environment = "", os.environ | {"PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as run:
        limit = threading.Timer(SECONDS_FOR_TESTS, run.kill)
        limit.start()
        assert run.stdout is not None
        for line in run.stdout:
            print(line, end="", flush=True)
            last = line.strip("= \n") or last
        status = run.wait()
        limit.cancel()
    late = status == -signal.SIGKILL
    return f"stopped after {SECONDS_FOR_TESTS:.0f} s, at: {last}" if late else last, status


def _finish(findings: Findings, found: machine.Machine, options: argparse.Namespace, failed: bool) -> int:
    day = datetime.now(UTC).date()
    text = report.document(findings, f"{found.gpu}, {day.isoformat()}")
    print(f"\n{text}", flush=True)
    if options.write and options.only is None:
        path = report.path_of(day, found.slug)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        say(f"written to {path}")
    say("FAILED" if failed else "all checks passed")
    return 1 if failed else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.gpu.check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="fewer draws and batches, no memory checks")
    parser.add_argument(
        "--only", choices=("tests", "benchmarks", "loop", "memory"), help="that alone; keeps no file"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for everything (%(default)g)")
    parser.add_argument("--no-write", dest="write", action="store_false", help="print, and keep no file")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
