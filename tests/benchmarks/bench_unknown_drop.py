"""What does it cost not to know how large a drop will be? Prints one table.

The exact oracle of `bench_detection` is told the drop. Here it stands beside one that knows everything but
which of the three it will be: the largest of the three oracles' statistics, at the same realised false-alarm
rate. Nobody who does not know the drop can be much faster. The runs are the first of `bench_detection`'s. Run
it (ten minutes; committed in results/unknown_drop.md) as

    python -m tests.benchmarks.bench_unknown_drop [--runs 60]
"""

from __future__ import annotations

import argparse
import multiprocessing
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
from tests.benchmarks.detection.traffic import SCENARIOS, Change, Floats, Scenario, simulate

ORACLE_REQUESTS: Final = 200_000  # without a change, for the thresholds
MEAN_TIME: Final = 200_000.0  # requests to a false alarm


def paths_without_change(scenario: Scenario) -> Floats:
    """Of the oracle of each drop [DROPS, ORACLE_REQUESTS]."""
    steady = simulate(scenario.family, seed_of(scenario.family, ORACLE, 0), ORACLE_REQUESTS)
    return np.array([oracle.statistic(steady, Change(0, drop, scenario.ramp)) for drop in DROPS])


def paths_after(scenario: Scenario, drop: float, number: int) -> Floats:
    """Of the oracle of each drop, from the change on [DROPS, ORACLE_HORIZON]."""
    traffic = traffic_of(scenario, number, drop).part(RUN_IN - ORACLE_RUN_IN, RUN_IN + ORACLE_HORIZON)
    return np.array(
        [
            oracle.statistic(traffic, Change(ORACLE_RUN_IN, told, scenario.ramp))[ORACLE_RUN_IN:]
            for told in DROPS
        ]
    )


def median_delay(paths: list[Floats], threshold: float) -> float:
    first = [over[0] + 1.0 if len(over := np.flatnonzero(path >= threshold)) else np.inf for path in paths]
    return float(np.quantile(first, 0.5, method="higher"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=60)
    runs = parser.parse_args().runs
    print(
        f"seed {SEED}, {runs} runs, a false alarm in {MEAN_TIME:,.0f} requests; median requests to the alarm"
    )
    print(f"{'scenario':52s}  drop   told  one of three  ratio")
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        for scenario in SCENARIOS:
            steady = paths_without_change(scenario)
            told = [oracle.threshold(path, MEAN_TIME) for path in steady]
            of_three = oracle.threshold(steady.max(axis=0), MEAN_TIME)
            for place, drop in enumerate(DROPS):
                after = pool.map(partial(paths_after, scenario, drop), range(runs))
                knows = median_delay([paths[place] for paths in after], told[place])
                knows_not = median_delay([paths.max(axis=0) for paths in after], of_three)
                print(
                    f"{scenario.name:52s}  {drop:.2f}  {knows:5,.0f}  {knows_not:12,.0f}  "
                    f"{knows_not / knows:5.2f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
