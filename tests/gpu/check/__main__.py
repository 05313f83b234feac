"""Builds, tests and measures the engine's CUDA kernels and loop on the GPU of this machine: `make gpu-check`.

    PYTHONPATH=.:engine:engine/training python -m tests.gpu.check [--quick] [--only loop] [--no-write]

Needs Python 3.11 or newer with torch, transformers, numpy, scipy, pytest and cuda-bindings; installs nothing.
Exit status: 0 all tests passed, 1 one failed, 2 nothing could be checked here.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from datetime import UTC, datetime

import torch
from driftguard_engine.kernels.cuda.compiler import KernelsUnavailable
from driftguard_engine.kernels.cuda.launcher import LaunchFailed

from tests.gpu.check import benchmarks, building, machine, report, sanitize, suite
from tests.gpu.check.loop import running
from tests.gpu.check.report import Findings

SECONDS = 780.0  # for everything
SECONDS_FOR_TESTS = 260.0
SECONDS_FOR_BENCHMARKS = 150.0
SECONDS_FOR_LOOP = 240.0

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
            _keep(findings, found_machine, options)
        if options.only in (None, "benchmarks"):
            failed |= _measure(findings, built, found_machine, options.quick, end)
            _keep(findings, found_machine, options)
        if options.only in (None, "loop"):
            failed |= _measure_loop(findings, options.quick, end)
            _keep(findings, found_machine, options)
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
        say("  the compiler's log does not show the kernels' registers and memory")
    for one in built.resources:
        say(
            f"  {one.kernel}: {one.registers} registers, {one.stack_bytes} bytes of stack,"
            f" {one.spill_bytes} spilled, {one.shared_bytes} shared"
        )


def _test(findings: Findings, quick: bool) -> bool:
    """True: failed."""
    outcome, failed = suite.run(quick, SECONDS_FOR_TESTS, say)
    findings.steps.append(("tests/gpu", f"FAILED: {outcome}" if failed else outcome))
    return failed


def _measure(
    findings: Findings, built: building.Built, found: machine.Machine, quick: bool, end: float
) -> bool:
    """True: something failed; the measurements before it are kept."""
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
    try:
        torch.cuda.empty_cache()  # the loop's own process needs the memory
    except RuntimeError as lost:  # lost by a benchmark that failed; another process can still use the device
        say(f"this process has lost the device: {str(lost).splitlines()[0]}")
    seconds = min(SECONDS_FOR_LOOP, end - time.monotonic())
    found = running.measure("quick" if quick else "full", seconds, say)
    findings.measured.loop = found
    for failure in found.failures:
        findings.steps.append(("loop", f"FAILED: {failure}"))
    return bool(found.failures)


def _finish(findings: Findings, found: machine.Machine, options: argparse.Namespace, failed: bool) -> int:
    print(f"\n{_keep(findings, found, options)}", flush=True)
    say("FAILED" if failed else "all checks passed")
    return 1 if failed else 0


def _keep(findings: Findings, found: machine.Machine, options: argparse.Namespace) -> str:
    """The report of the results so far: it is kept even if this program is ended early."""
    day = datetime.now(UTC).date()
    text = report.document(findings, f"{found.gpu}, {day.isoformat()}")
    if options.write and options.only is None:
        path = report.path_of(day, found.slug)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        say(f"written to {path}")
    return text


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
