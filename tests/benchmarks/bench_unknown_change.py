"""How near to the exact oracle can a detector come? Prints one table.

The exact oracle of `bench_detection` is given the size and the place of the drop. Here it is compared with
three detectors that know less; all of them are given the exact distributions of requests before and after:

- one that knows all but the size of the drop, which is one of three;
- one that knows neither the drop nor the place, which is any one segment or all of them;
- one that knows as little and states its false alarms as DriftGuard does: by theory, A requests or more to
  the first one, whatever the means are within `ignore`. It is the sum of likelihood ratios (Shiryaev,
  Roberts) of all cases, equally weighted, against means that are already lower by `ignore`.

The first two alarm where the oracle of any case is beyond its own threshold by a margin that makes the
measured false-alarm rate the same. No detector that knows as little can be much faster in all cases at once.
The last column is DriftGuard, which knows no distribution. The runs are the first of `bench_detection`'s. Run
it (twenty minutes; committed in results/unknown_change.md) as

    python -m tests.benchmarks.bench_unknown_change [--runs 100]
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Final

import numpy as np

from driftguard.detection import DetectorConfig
from tests.benchmarks.detection import oracle
from tests.benchmarks.detection.measure import (
    DROPS,
    ORACLE,
    ORACLE_HORIZON,
    ORACLE_RUN_IN,
    RUN_IN,
    SEED,
    Delays,
    requests_until,
    seed_of,
    traffic_of,
)
from tests.benchmarks.detection.ours import delay, warmed_up
from tests.benchmarks.detection.traffic import SCENARIOS, Change, Floats, Scenario, Traffic, simulate

ORACLE_REQUESTS: Final = 200_000  # without a change, for the thresholds
MEAN_TIME: Final = 200_000.0  # requests to a false alarm
CONFIG: Final = DetectorConfig()

Place = tuple[int, ...] | None  # segments that fall; None: all


@dataclass(frozen=True, slots=True)
class Run:
    """After one change: statistics of the cases [PLACES, DROPS, N], and DriftGuard's delay in requests."""

    largest: Floats
    summed: Floats
    ours: float


def places(traffic: Traffic) -> list[Place]:
    """That of the scenario first."""
    layout = traffic.layout
    each: list[Place] = [(segment,) for segment in range(len(layout.names))] if len(layout.names) > 1 else []
    return [layout.affected, *(place for place in [None, *each] if place != layout.affected)]


def statistics(
    traffic: Traffic, start: int, ramp: int, drops: Sequence[float] = DROPS, over: np.ufunc = np.maximum
) -> Floats:
    """Of the oracle of each place and drop: [PLACES, DROPS, N]."""
    told = [replace(traffic, layout=replace(traffic.layout, affected=place)) for place in places(traffic)]
    return np.array(
        [[oracle.statistic(each, Change(start, drop, ramp), over) for drop in drops] for each in told]
    )


def without_change(scenario: Scenario) -> Floats:
    steady = simulate(scenario.family, seed_of(scenario.family, ORACLE, 0), ORACLE_REQUESTS)
    return statistics(steady, 0, scenario.ramp)


def after_change(scenario: Scenario, drop: float, number: int) -> Run | None:
    """None after a false alarm of DriftGuard before the change."""
    whole = traffic_of(scenario, number, drop)
    batch = whole.batch()
    state = warmed_up(CONFIG, batch[:RUN_IN])
    if state is None:
        return None
    traffic = whole.part(RUN_IN - ORACLE_RUN_IN, RUN_IN + ORACLE_HORIZON)
    lowest = replace(traffic, layout=replace(traffic.layout, mean=traffic.layout.mean - CONFIG.ignore))
    beyond = [drop - CONFIG.ignore for drop in DROPS]
    return Run(
        statistics(traffic, ORACLE_RUN_IN, scenario.ramp)[:, :, ORACLE_RUN_IN:],
        statistics(lowest, ORACLE_RUN_IN, scenario.ramp, beyond, np.logaddexp)[:, :, ORACLE_RUN_IN:],
        delay(CONFIG, state, batch[RUN_IN:]) or math.inf,
    )


def delays(steady: Floats, runs: list[Run], drop: int) -> list[float]:
    """Medians: told place and drop, only the place, neither; who also states false alarms; ours."""
    # Each case may raise as many false alarms as any other; the slow ones would otherwise pay for the fast.
    shares = np.array([[oracle.threshold(path, MEAN_TIME) for path in paths] for paths in steady])
    known: list[tuple[int | slice, int | slice]] = [(0, drop), (0, slice(None)), (slice(None), slice(None))]
    found = []
    for which in known:
        share = shares[which]
        threshold = oracle.threshold(_largest(steady[which], share), MEAN_TIME)
        found.append([requests_until(_largest(run.largest[which], share), threshold) for run in runs])
    needed = math.log(CONFIG.false_alarm_every)
    found.append([requests_until(_log_mean(run.summed), needed) for run in runs])
    found.append([run.ours for run in runs])
    return [Delays(tuple(requests), 0).quantile(0.5) for requests in found]


def _largest(paths: Floats, shares: Floats) -> Floats:
    """[..., N], [...] -> [N], at least 0."""
    beyond = np.maximum(paths - shares[..., np.newaxis] + shares.min(), 0.0)
    largest: Floats = beyond.reshape(-1, paths.shape[-1]).max(axis=0)
    return largest


def _log_mean(log_sums: Floats) -> Floats:
    """[PLACES, DROPS, N] -> [N]."""
    cases = log_sums.reshape(-1, log_sums.shape[-1])
    mean: Floats = np.logaddexp.reduce(cases, axis=0) - math.log(len(cases))
    return mean


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    runs = parser.parse_args().runs
    print(
        f"seed {SEED}, {runs} runs; median requests to the alarm. A false alarm in {MEAN_TIME:,.0f}\n"
        f"requests, realised; stated and ours: in {CONFIG.false_alarm_every:,.0f} or more, by theory\n"
    )
    print(f"{'scenario':50s}  drop   told    not the drop   nor the place          stated            ours")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for scenario in SCENARIOS:
            steady = without_change(scenario)
            for number, drop in enumerate(DROPS):
                after = pool.map(partial(after_change, scenario, drop), range(runs), chunksize=1)
                told, *others = delays(steady, [run for run in after if run is not None], number)
                columns = "".join(f"  {other:5,.0f}, {other / told:.2f} x" for other in others)
                print(f"{scenario.name:50s}  {drop:.2f}  {told:5,.0f}{columns}", flush=True)


if __name__ == "__main__":
    main()
