"""What does it cost not to know how large a drop will be, and where? Prints one table.

The exact oracle of `bench_detection` is told both. Here it stands beside one that knows everything but which
of the three drops it will be, and one that knows neither the drop nor the place, which is any one segment or
all of them. They alarm where the oracle of any case is as far beyond its own threshold as makes the realised
false-alarm rate the same. Nobody who knows as little can be much faster. The runs are the first of
`bench_detection`'s. Run it (two to five minutes; committed in results/unknown_change.md) as

    python -m tests.benchmarks.bench_unknown_change [--runs 60]
"""

from __future__ import annotations

import argparse
import multiprocessing
from dataclasses import replace
from functools import partial
from typing import Final

import numpy as np

from tests.benchmarks.detection import oracle
from tests.benchmarks.detection.measure import (
    DROPS,
    ORACLE,
    ORACLE_HORIZON,
    ORACLE_RUN_IN,
    RUN_IN,
    SEED,
    seed_of,
    traffic_of,
)
from tests.benchmarks.detection.traffic import SCENARIOS, Change, Floats, Scenario, Traffic, simulate

ORACLE_REQUESTS: Final = 200_000  # without a change, for the thresholds
MEAN_TIME: Final = 200_000.0  # requests to a false alarm

Place = tuple[int, ...] | None  # segments that fall; None: all


def places(traffic: Traffic) -> list[Place]:
    """That of the scenario first."""
    layout = traffic.layout
    each: list[Place] = [(segment,) for segment in range(len(layout.names))] if len(layout.names) > 1 else []
    return [layout.affected, *(place for place in [None, *each] if place != layout.affected)]


def statistics(traffic: Traffic, start: int, ramp: int) -> Floats:
    """Of the oracle of each place and drop: [PLACES, DROPS, N]."""
    told = [replace(traffic, layout=replace(traffic.layout, affected=place)) for place in places(traffic)]
    return np.array([[oracle.statistic(each, Change(start, drop, ramp)) for drop in DROPS] for each in told])


def without_change(scenario: Scenario) -> Floats:
    steady = simulate(scenario.family, seed_of(scenario.family, ORACLE, 0), ORACLE_REQUESTS)
    return statistics(steady, 0, scenario.ramp)


def after_change(scenario: Scenario, drop: float, number: int) -> Floats:
    traffic = traffic_of(scenario, number, drop).part(RUN_IN - ORACLE_RUN_IN, RUN_IN + ORACLE_HORIZON)
    return statistics(traffic, ORACLE_RUN_IN, scenario.ramp)[:, :, ORACLE_RUN_IN:]


def median_delay(paths: list[Floats], threshold: float) -> float:
    first = [over[0] + 1.0 if len(over := np.flatnonzero(path >= threshold)) else np.inf for path in paths]
    return float(np.quantile(first, 0.5, method="higher"))


def delays(steady: Floats, after: list[Floats], drop: int) -> list[float]:
    """Of who is told place and drop, only the place, and neither."""
    # Each case may raise as many false alarms as any other; the slow ones would otherwise pay for the fast.
    shares = np.array([[oracle.threshold(path, MEAN_TIME) for path in paths] for paths in steady])
    known: list[tuple[int | slice, int | slice]] = [(0, drop), (0, slice(None)), (slice(None), slice(None))]
    found = []
    for which in known:
        share = shares[which]
        threshold = oracle.threshold(_largest(steady[which], share), MEAN_TIME)
        found.append(median_delay([_largest(paths[which], share) for paths in after], threshold))
    return found


def _largest(paths: Floats, shares: Floats) -> Floats:
    """[..., N], [...] -> [N], at least 0."""
    beyond = np.maximum(paths - shares[..., np.newaxis] + shares.min(), 0.0)
    largest: Floats = beyond.reshape(-1, paths.shape[-1]).max(axis=0)
    return largest


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=60)
    runs = parser.parse_args().runs
    print(
        f"seed {SEED}, {runs} runs, a false alarm in {MEAN_TIME:,.0f} requests; median requests to the alarm"
    )
    print(f"{'scenario':50s}  drop   told  not the drop       nor the place")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for scenario in SCENARIOS:
            steady = without_change(scenario)
            for place, drop in enumerate(DROPS):
                after = pool.map(partial(after_change, scenario, drop), range(runs))
                told, where, neither = delays(steady, after, place)
                print(
                    f"{scenario.name:50s}  {drop:.2f}  {told:5,.0f}  {where:5,.0f}, {where / told:.2f} x"
                    f"  {neither:9,.0f}, {neither / told:.2f} x",
                    flush=True,
                )


if __name__ == "__main__":
    main()
