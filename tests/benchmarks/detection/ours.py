"""DriftGuard's detector on simulated traffic: its false alarms, its first alarm after a change, its cost."""

from __future__ import annotations

import time
from dataclasses import dataclass

from driftguard.detection import (
    BaselineReady,
    DetectorConfig,
    DriftOpened,
    Finding,
    ObservationBatch,
    StreamState,
    fold,
)
from tests.benchmarks.detection.calibration import FalseAlarms
from tests.benchmarks.detection.traffic import Family, simulate

BATCH = 4_096
FIRST_STEP = 128  # requests folded at once after a change; doubled until the alarm


@dataclass(frozen=True, slots=True)
class Watched:
    """Streams without a change, each until its first alarm (of either direction) or its end."""

    false_alarms: FalseAlarms  # watched: from the end of the last reference period, or from the first alarm's
    folded: int  # requests
    cpu_seconds: float  # inside fold


def watch_steady(config: DetectorConfig, family: Family, seeds: list[list[int]], requests: int) -> Watched:
    watched = alarms = folded = 0
    cpu_seconds = 0.0
    for seed in seeds:
        batch, state, ready = simulate(family, seed, requests).batch(), StreamState(), 0
        for start in range(0, requests, BATCH):
            part = batch[start : start + BATCH]
            begun = time.process_time()
            state, findings = fold(config, state, part)
            cpu_seconds += time.process_time() - begun
            folded += len(part)
            first = first_alarm(findings)
            before = [item for item in findings if first is None or item.ordinal < first.ordinal]
            ready = max([ready, *(item.ordinal for item in before if isinstance(item, BaselineReady))])
            if first is not None:
                watched += first.ordinal - ready
                alarms += 1
                break
        else:
            watched += requests - ready
    return Watched(FalseAlarms(watched, alarms), folded, cpu_seconds)


def first_alarm(findings: list[Finding], *, falls_only: bool = False) -> DriftOpened | None:
    for finding in findings:
        if isinstance(finding, DriftOpened) and (finding.direction == "down" or not falls_only):
            return finding
    return None


def warmed_up(config: DetectorConfig, batch: ObservationBatch) -> StreamState | None:
    """The state after traffic without a change; None after a false alarm."""
    state = StreamState()
    for start in range(0, len(batch), BATCH):
        state, findings = fold(config, state, batch[start : start + BATCH])
        if first_alarm(findings):
            return None
    return state


def delay(config: DetectorConfig, state: StreamState, batch: ObservationBatch) -> int | None:
    """Requests of the batch, which begins with the change, up to the alarm that acceptance fell."""
    start, step = 0, FIRST_STEP
    while start < len(batch):
        state, findings = fold(config, state, batch[start : start + step])
        found = first_alarm(findings, falls_only=True)
        if found is not None:
            return found.ordinal - int(batch.ordinal[0]) + 1
        start, step = start + step, 2 * step
    return None
