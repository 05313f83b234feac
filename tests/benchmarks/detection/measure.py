"""The measurements, each one task of its own process: what it simulates and what comes back.

Every number of requests and runs is in `Effort`; every random number follows from SEED, the family and a
stream's number, so that all detectors see the same streams.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from driftguard.detection import DetectorConfig
from tests.benchmarks.detection import oracle
from tests.benchmarks.detection.calibration import Calibrated, FalseAlarms, by_search, from_paths
from tests.benchmarks.detection.competitors import (
    COMPETITORS,
    KSWIN_MEMORY,
    REFERENCE,
    SLOW,
    Kswin,
    PathDetector,
    RiverDetector,
)
from tests.benchmarks.detection.ours import Watched, delay, warmed_up, watch_steady
from tests.benchmarks.detection.traffic import (
    FAMILIES,
    SCENARIOS,
    Change,
    Family,
    Floats,
    Scenario,
    Traffic,
    simulate,
)

SEED = 20_250_714
DROPS = (0.05, 0.10, 0.20)
EQUAL_RATE = 20_000.0  # requests to a false alarm at which all detectors are compared
RUN_IN = 30_000  # requests before a change: the baseline of a 10% segment has stopped growing
COMPARED_RUN_IN = 6_000  # the last of them, which is all that is seen where detectors are compared
HORIZON = 6_000  # requests after it; a later alarm counts as none
ORACLE_RUN_IN, ORACLE_HORIZON = 1_000, 4_000  # the oracle is slow in sessions, and needs no more
LONG_STREAM, SHORT_STREAM = 200_000, 40_000
SURELY_RARER = 8.0  # times EQUAL_RATE without an alarm: a search need not look further
IN_CONTROL, CALIBRATION, DELAY, ORACLE = range(4)  # what a seed is for


@dataclass(frozen=True, slots=True)
class Effort:
    long_streams: int  # of LONG_STREAM requests, for the realised time to a false alarm of ours
    short_streams: int  # of SHORT_STREAM requests, for every calibration
    oracle_requests: int
    runs: int  # per cell, of ours and the oracle
    competitor_runs: int
    slow_streams: int  # of SHORT_STREAM requests, and runs per cell, of SLOW competitors
    slow_runs: int


FULL = Effort(20, 16, 200_000, 200, 40, 6, 16)
QUICK = Effort(1, 3, 40_000, 8, 3, 1, 2)
Detector = PathDetector | RiverDetector | Kswin


@dataclass(frozen=True, slots=True)
class Delays:
    """Requests from the change to the alarm, infinity where none came within HORIZON."""

    requests: tuple[float, ...]
    alarmed_before: int  # runs left out, because they raised a false alarm before the change

    def quantile(self, part: float) -> float:
        """An order statistic, so that infinity needs no arithmetic."""
        return float(np.quantile(self.requests, part, method="higher")) if self.requests else math.nan


@dataclass(frozen=True, slots=True)
class OursAndOracle:
    """One scenario and drop: ours and the oracle on the same runs."""

    ours: Delays
    oracle: Delays
    oracle_at_equal_rate: Delays


def seed_of(family: Family, purpose: int, number: int) -> list[int]:
    return [SEED, FAMILIES.index(family), purpose, number]


def ours_false_alarms(effort: Effort, family: Family) -> Watched:
    seeds = [seed_of(family, IN_CONTROL, number) for number in range(effort.long_streams)]
    return watch_steady(DetectorConfig(), family, seeds, LONG_STREAM)


def ours_and_oracle(effort: Effort, scenario: Scenario, mean_time: float) -> list[OursAndOracle]:
    """Per drop. The oracle has ours' realised mean time to a false alarm, and EQUAL_RATE."""
    steady = simulate(scenario.family, seed_of(scenario.family, ORACLE, 0), effort.oracle_requests)
    thresholds = []
    for drop in DROPS:
        path = oracle.statistic(steady, Change(0, drop, scenario.ramp))
        thresholds.append([oracle.threshold(path, time) for time in (mean_time, EQUAL_RATE)])
    ours: list[list[float]] = [[] for _ in DROPS]
    oracles: list[list[list[float]]] = [[[], []] for _ in DROPS]
    skipped = 0
    for number in range(effort.runs):
        state = None
        for index, drop in enumerate(DROPS):
            traffic = traffic_of(scenario, number, drop)
            batch = traffic.batch()
            state = state or warmed_up(DetectorConfig(), batch[:RUN_IN])
            if state is None:
                skipped += 1
                break
            ours[index].append(delay(DetectorConfig(), state, batch[RUN_IN:]) or math.inf)
            recent = traffic.part(RUN_IN - ORACLE_RUN_IN, RUN_IN + ORACLE_HORIZON)
            path = oracle.statistic(recent, Change(ORACLE_RUN_IN, drop, scenario.ramp))[ORACLE_RUN_IN:]
            for level, threshold in enumerate(thresholds[index]):
                oracles[index][level].append(requests_until(path, threshold))
    return [
        OursAndOracle(
            Delays(tuple(ours[index]), skipped), *(Delays(tuple(found), 0) for found in oracles[index])
        )
        for index in range(len(DROPS))
    ]


def requests_until(path: Floats, threshold: float) -> float:
    """Up to the first at which the path [N] has reached it; infinity where it does not."""
    over = np.flatnonzero(path >= threshold)
    return float(over[0] + 1) if len(over) else math.inf


def ours_at_equal_rate(effort: Effort, family: Family) -> tuple[Calibrated, list[list[Delays]]]:
    """A (as log10) that realises EQUAL_RATE, and the delays of the family's scenarios and drops with it."""
    seeds = [seed_of(family, CALIBRATION, number) for number in range(effort.short_streams)]

    def false_alarms(log_a: float) -> FalseAlarms:
        config = DetectorConfig(false_alarm_every=10.0**log_a)
        return watch_steady(config, family, seeds, SHORT_STREAM).false_alarms

    calibrated = by_search(false_alarms, 2.0, 5.0, EQUAL_RATE)
    config = DetectorConfig(false_alarm_every=10.0**calibrated.threshold)
    return calibrated, [_our_delays(effort, config, scenario) for scenario in scenarios_of(family)]


def _our_delays(effort: Effort, config: DetectorConfig, scenario: Scenario) -> list[Delays]:
    found: list[list[float]] = [[] for _ in DROPS]
    skipped = 0
    for number in range(effort.competitor_runs):
        state = None
        for index, drop in enumerate(DROPS):
            batch = _compared(scenario, number, drop).batch()
            state = state or warmed_up(config, batch[:COMPARED_RUN_IN])
            if state is None:
                skipped += 1
                break
            found[index].append(delay(config, state, batch[COMPARED_RUN_IN:]) or math.inf)
    return [Delays(tuple(requests), skipped) for requests in found]


def competitor(effort: Effort, family: Family, name: str) -> tuple[Calibrated, list[list[Delays]]]:
    """The threshold that realises EQUAL_RATE, and the delays of the family's scenarios and drops with it."""
    detector = next(item for item in COMPETITORS if item.name == name)
    slow = name in SLOW
    streams = [
        simulate(family, seed_of(family, CALIBRATION, number), SHORT_STREAM)
        for number in range(effort.slow_streams if slow else effort.short_streams)
    ]
    calibrated = _calibrated(detector, streams)
    numbers = range(effort.slow_runs if slow else effort.competitor_runs)
    found = [
        [
            _delays(
                detector,
                calibrated.threshold,
                [_compared(scenario, n, drop) for n in numbers],
            )
            for drop in DROPS
        ]
        for scenario in scenarios_of(family)
    ]
    return calibrated, found


def scenarios_of(family: Family) -> list[Scenario]:
    return [scenario for scenario in SCENARIOS if scenario.family is family]


def _calibrated(detector: Detector, streams: Sequence[Traffic]) -> Calibrated:
    if isinstance(detector, Kswin):
        return from_paths([detector.path(traffic) for traffic in streams], EQUAL_RATE)
    if isinstance(detector, PathDetector):
        return from_paths([path[REFERENCE:] for path in detector.paths(streams)], EQUAL_RATE)
    return by_search(
        lambda threshold: _river_false_alarms(detector, threshold, streams),
        detector.loosest,
        detector.strictest,
        EQUAL_RATE,
    )


def _river_false_alarms(detector: RiverDetector, threshold: float, streams: Sequence[Traffic]) -> FalseAlarms:
    watched = alarms = 0
    for traffic in streams:
        place = detector.first_alarm(threshold, traffic)
        watched += (len(traffic) if place is None else place + 1) - REFERENCE
        alarms += place is not None
        if alarms == 0 and watched >= SURELY_RARER * EQUAL_RATE:
            break
    return FalseAlarms(watched, alarms)


def traffic_of(scenario: Scenario, number: int, drop: float) -> Traffic:
    """RUN_IN requests before the change, HORIZON after it."""
    change = Change(RUN_IN, drop, scenario.ramp)
    return simulate(scenario.family, seed_of(scenario.family, DELAY, number), RUN_IN + HORIZON, change)


def _compared(scenario: Scenario, number: int, drop: float) -> Traffic:
    return traffic_of(scenario, number, drop).part(RUN_IN - COMPARED_RUN_IN, RUN_IN + HORIZON)


def _delays(detector: Detector, threshold: float, runs: Sequence[Traffic]) -> Delays:
    places: list[int | None]
    if isinstance(detector, PathDetector):
        over = [np.flatnonzero(path >= threshold) for path in detector.paths(runs)]
        places = [int(found[0]) if len(found) else None for found in over]
        places = [None if place is None else place - COMPARED_RUN_IN for place in places]
    elif isinstance(detector, Kswin):
        recent = [traffic.part(COMPARED_RUN_IN - KSWIN_MEMORY, len(traffic)) for traffic in runs]
        places = [detector.first_alarm(threshold, traffic) for traffic in recent]
        places = [None if place is None else place - KSWIN_MEMORY for place in places]
    else:
        places = [detector.first_alarm(threshold, traffic) for traffic in runs]
        places = [None if place is None else place - COMPARED_RUN_IN for place in places]
    after = [math.inf if place is None else place + 1.0 for place in places if place is None or place >= 0]
    return Delays(tuple(after), len(places) - len(after))
