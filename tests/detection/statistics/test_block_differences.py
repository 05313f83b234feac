"""The variance inflation from blocks that follow each other."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from driftguard.detection.statistics.block_differences import inflation_shown
from tests.benchmarks.detection.dependent import wander

RUNS = 1_000


def shown(residual: NDArray[np.float64], changes: int = 1, against_mean: float = np.inf) -> float:
    return inflation_shown([residual], 1.0, 500, changes, against_mean=against_mean)


@pytest.mark.parametrize(("observations", "changes"), [(200, 1), (1_500, 1), (1_500, 2), (8_000, 2)])
def test_independent_observations_show_none(observations: int, changes: int) -> None:
    rng = np.random.default_rng([31, observations])
    falsely = sum(shown(rng.normal(size=observations), changes) > 1.0 for _ in range(RUNS))
    print(f"seed [31, {observations}]: {falsely} of {RUNS} shown falsely")
    assert falsely <= 0.015 * RUNS


def test_a_mean_that_wanders_is_shown_whatever_its_level() -> None:
    for seed in range(10):
        rng = np.random.default_rng([32, seed])
        residual = rng.normal(size=8_000) + 0.4 * wander(rng, 8_000, 300.0)
        assert shown(residual) > 5.0
        assert shown(residual + 7.0) == pytest.approx(shown(residual))


def test_runs_of_five_show_what_they_are() -> None:
    """Four fifths of the variance between runs: f = 1 / 5 + 4."""
    rng = np.random.default_rng(33)
    of_runs = np.repeat(rng.normal(0.0, np.sqrt(0.8), 4_000), 5)
    found = shown(of_runs + rng.normal(0.0, np.sqrt(0.2), 20_000))
    print(f"seed 33: {found:.2f}")
    assert 4.0 < found < 8.0


@pytest.mark.parametrize("begin", [700, 1_024, 1_333])
def test_a_change_at_once_and_its_repair_show_none(begin: int) -> None:
    residual = np.random.default_rng(34).normal(size=4_000)
    residual[begin:] -= 3.0
    assert shown(residual) == 1.0
    residual[begin + 900 :] += 3.0
    assert shown(residual, changes=2) == 1.0


def test_changes_that_are_known_show_none_however_many() -> None:
    residual = np.random.default_rng(37).normal(size=6_000)
    inside = np.arange(6_000) % 1_000 >= 700
    residual[inside] -= 2.0
    assert shown(residual, changes=2) > 10.0
    assert inflation_shown([residual[~inside], *np.split(residual[inside], 6)], 1.0, 500, 1) == 1.0


def test_a_mean_that_wanders_inside_of_changes_is_shown() -> None:
    rng = np.random.default_rng(38)
    residual = rng.normal(size=8_000) + 0.4 * wander(rng, 8_000, 300.0)
    assert inflation_shown([residual[:2_000], *np.split(residual[2_000:], 3)], 1.0, 500, 1) > 5.0


def test_a_decline_shows_none() -> None:
    residual = np.random.default_rng(35).normal(size=4_000) - np.linspace(0.0, 1.0, 4_000)
    assert shown(residual) == 1.0


@pytest.mark.parametrize(("observations", "memory"), [(3_000, 100.0), (8_000, 600.0)])
def test_a_mean_that_wanders_for_longer_than_blocks_is_shown_as_far_as_it_goes(
    observations: int, memory: float
) -> None:
    """The longest blocks that are enough are of 128 observations, or of 512."""
    true = 1.0 + 2.0 * memory * 0.4**2
    found = []
    for seed in range(20):
        rng = np.random.default_rng([36, seed])
        residual = rng.normal(size=observations) + 0.4 * wander(rng, observations, memory)
        found.append(shown(residual, against_mean=128.0))
    print(f"seeds [36, 0..19]: {np.median(found):.0f} in the median, {true:.0f} in truth")
    assert 0.5 * true < np.median(found) < 2.0 * true
