"""How often does the interval of a change point hold the true one? Prints one table.

RUNS streams per kind of traffic (`tests/benchmarks/detection/traffic.py`), each with a drop of .05, .10
and .20 after the same RUN_IN requests; nothing is tuned. "held": part of the alarms whose interval holds the
first request of the change; "width": requests from the interval's first to its last record; "off":
requests between the change point that was named and the true one. Run it as

    python -m tests.benchmarks.bench_change_point [--runs 300]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from driftguard.detection import DetectorConfig, DriftOpened, ObservationBatch, StreamState, fold
from tests.benchmarks.detection.measure import DROPS, SEED
from tests.benchmarks.detection.ours import first_alarm
from tests.benchmarks.detection.traffic import FAMILIES, Change, Family, simulate
from tests.detection.traffic import requests

RUN_IN, HORIZON, STEP = 6_000, 6_000, 500
DAY_REQUESTS, RHYTHM = 600, 0.08  # the rhythm is learned well before the change, on the eleventh day
CONFIG = DetectorConfig()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of traffic: RUN_IN + HORIZON requests from a run's number and its drop."""

    name: str
    batch: Callable[[int, float], ObservationBatch]


def of_family(family: Family, *, named: bool = True) -> Callable[[int, float], ObservationBatch]:
    def batch(number: int, drop: float) -> ObservationBatch:
        seed = [SEED, FAMILIES.index(family), number]
        made = simulate(family, seed, RUN_IN + HORIZON, Change(RUN_IN, drop)).batch()
        return made if named else replace(made, session=[None] * len(made))

    return batch


def with_rhythm(number: int, drop: float) -> ObservationBatch:
    """Spread evenly over days that begin at another hour in every run."""
    before, after = np.random.default_rng([SEED, len(FAMILIES), number]).spawn(2)
    day = (np.arange(RUN_IN + HORIZON) + before.integers(DAY_REQUESTS)) / DAY_REQUESTS
    mean = 0.65 + RHYTHM * np.sin(2.0 * np.pi * day)
    first = requests(before, mean[:RUN_IN])
    last = requests(after, mean[RUN_IN:] - drop, first_ordinal=RUN_IN + 1)
    return ObservationBatch.of(
        np.arange(1, len(day) + 1),
        ["chat"] * len(day),
        np.concatenate([first.drafted, last.drafted]),
        np.concatenate([first.accepted, last.accepted]),
        1_700_006_400.0 + 86_400.0 * day,
    )


KINDS = (
    Kind("one segment", of_family(FAMILIES[0])),
    Kind("three segments, wandering mix", of_family(FAMILIES[1])),
    Kind("sessions, adjacent, named", of_family(FAMILIES[5])),
    Kind("sessions, interleaved, named", of_family(FAMILIES[6])),
    Kind("sessions, adjacent, not named", of_family(FAMILIES[5], named=False)),
    Kind("lengths jump as well", of_family(FAMILIES[7])),
    Kind("daily rhythm", with_rhythm),
)


def found_after(kind: Kind, runs: int) -> dict[float, list[DriftOpened]]:
    """Per drop, the alarms of the runs; those with an open incident at the change are left out."""
    found: dict[float, list[DriftOpened]] = {drop: [] for drop in DROPS}
    for number in range(runs):
        state = None
        for drop in DROPS:
            batch = kind.batch(number, drop)
            state = state or fold(CONFIG, StreamState(), batch[:RUN_IN])[0]
            if state.incidents != (None, None):
                break
            alarm = _alarm(state, batch[RUN_IN:])
            found[drop] += [alarm] if alarm else []
    return found


def _alarm(state: StreamState, batch: ObservationBatch) -> DriftOpened | None:
    for start in range(0, len(batch), STEP):
        state, findings = fold(CONFIG, state, batch[start : start + STEP])
        alarm = first_alarm(findings, falls_only=True)
        if alarm:
            return alarm
    return None


def line_of(kind: Kind, drop: float, alarms: list[DriftOpened]) -> str:
    truth = RUN_IN + 1
    held = np.mean([alarm.interval[0] <= truth <= alarm.interval[1] for alarm in alarms])
    width = np.median([alarm.interval[1] - alarm.interval[0] + 1 for alarm in alarms])
    off = np.median([abs(alarm.change_point - truth) for alarm in alarms])
    return f"{kind.name:30s}  {drop:.2f}  {len(alarms):6d}  {held:.3f}  {width:5.0f}  {off:4.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=300)
    runs = parser.parse_args().runs
    print(f"seed {SEED}, {runs} runs, A = {CONFIG.false_alarm_every:,.0f}")
    print(f"{'traffic':30s}  drop  alarms   held  width   off")
    for kind in KINDS:
        for drop, alarms in found_after(kind, runs).items():
            print(line_of(kind, drop, alarms), flush=True)


if __name__ == "__main__":
    main()
