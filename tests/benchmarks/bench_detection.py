"""False alarms and delays of the detector, the exact oracle, and what else could watch acceptance.

`python -m tests.benchmarks.bench_detection [--quick] [--output FILE]`; `make bench-detection` writes
tests/benchmarks/results/detection.md. Two processes. --quick runs everything on too little traffic to
mean anything.
"""

from __future__ import annotations

import argparse
import multiprocessing
import platform
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tests.benchmarks.detection.competitors import COMPETITORS, SLOW
from tests.benchmarks.detection.measure import (
    COMPARED_RUN_IN,
    FULL,
    LONG_STREAM,
    QUICK,
    RUN_IN,
    SEED,
    SHORT_STREAM,
    Effort,
    competitor,
    ours_and_oracle,
    ours_at_equal_rate,
    ours_false_alarms,
)
from tests.benchmarks.detection.report import OURS, Results, report
from tests.benchmarks.detection.traffic import FAMILIES, SCENARIOS

WORKERS = 2


@dataclass(frozen=True, slots=True)
class Task:
    """One measurement of a process; `of` names the family or the scenario, `detector` whose it is."""

    kind: str  # steady, delays, compared
    of: str
    detector: str
    effort: Effort
    mean_time: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="seconds; too little traffic to mean anything")
    parser.add_argument("--output", type=Path, help="write the tables here as well (not with --quick)")
    arguments = parser.parse_args()
    effort = QUICK if arguments.quick else FULL
    begun = time.perf_counter()
    results = measure(effort)
    minutes = (time.perf_counter() - begun) / 60.0
    text = f"{_header(effort, minutes, quick=arguments.quick)}\n\n{report(results)}\n"
    print(text)
    if arguments.output and not arguments.quick:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(text)


def measure(effort: Effort) -> Results:
    results = Results({}, {}, {})
    with multiprocessing.get_context("spawn").Pool(WORKERS, maxtasksperchild=8) as pool:
        steady = [Task("steady", family.name, OURS, effort) for family in FAMILIES]
        for task, result in _progress(pool.imap_unordered(run, steady), len(steady)):
            results.steady[task.of] = result
        tasks = []  # the longest first
        for scenario in SCENARIOS[::-1]:
            alarms = results.steady[scenario.family.name].false_alarms
            # Without a false alarm the time to one is only known to be long: the time watched stands for it.
            mean_time = float(alarms.watched / max(alarms.alarms, 1))
            tasks.append(Task("delays", scenario.name, OURS, effort, mean_time))
        tasks += [
            Task("compared", family.name, name, effort)
            for name in (*(detector.name for detector in COMPETITORS), OURS)
            for family in FAMILIES
        ]
        for task, result in _progress(pool.imap_unordered(run, tasks), len(tasks)):
            if task.kind == "delays":
                results.delays[task.of] = result
            else:
                results.compared[task.detector, task.of] = result
    return results


def run(task: Task) -> tuple[Task, Any]:
    if task.kind == "delays":
        scenario = next(item for item in SCENARIOS if item.name == task.of)
        return task, ours_and_oracle(task.effort, scenario, task.mean_time)
    family = next(item for item in FAMILIES if item.name == task.of)
    if task.kind == "steady":
        return task, ours_false_alarms(task.effort, family)
    if task.detector == OURS:
        return task, ours_at_equal_rate(task.effort, family)
    return task, competitor(task.effort, family, task.detector)


def _progress(finished: Iterable[tuple[Task, Any]], tasks: int) -> Iterable[tuple[Task, Any]]:
    begun = time.perf_counter()
    for done, (task, result) in enumerate(finished, 1):
        seconds = time.perf_counter() - begun
        print(f"{done}/{tasks} {seconds:.0f} s: {task.kind}, {task.detector}, {task.of}", file=sys.stderr)
        yield task, result


def _header(effort: Effort, minutes: float, *, quick: bool) -> str:
    versions = ", ".join(f"{name} {version(name)}" for name in ("numpy", "scipy", "river"))
    made = f"""# Detection: false alarms and delays

Made by `make bench-detection` (`tests/benchmarks/bench_detection.py`), seed {SEED}, in {minutes:.0f} minutes
on {_processor()}, {WORKERS} processes, Python {platform.python_version()}, {versions}.

Simulated requests of 20 to 199 drafted tokens whose true acceptance is beta-distributed around the mean of
their segment (sd .12 between requests), one a second; see `tests/benchmarks/detection/traffic.py`. Ours is
`fold(DetectorConfig(), ...)`, nothing tuned. The oracle is the CUSUM of the exact log-likelihood ratio, which
knows everything but the moment. All others see the stream as a whole.
"""
    slow = ", ".join(SLOW)
    sizes = {
        f"streams of {LONG_STREAM:,}, until a false alarm, of each traffic": effort.long_streams,
        f"calibration at the equal rate: streams of {SHORT_STREAM:,}, likewise": effort.short_streams,
        f"the same for {slow}": effort.slow_streams,
        "requests for the oracle's thresholds": effort.oracle_requests,
        f"runs per cell, ours and oracle, the change after {RUN_IN:,} requests": effort.runs,
        f"runs per cell at the equal rate, {COMPARED_RUN_IN:,} requests before it": effort.competitor_runs,
        f"such runs of {slow}": effort.slow_runs,
    }
    warning = "**Quick run: these numbers mean nothing.**\n\n" if quick else ""
    return warning + made + "\n" + "\n".join(f"- {what}: {number:,}" for what, number in sizes.items())


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
