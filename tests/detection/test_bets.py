from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftguard.detection.bets import BETS, DELTAS, factors, mean_over_bets, run_sums, stakes
from driftguard.detection.evidence import ranked

UNIT = st.floats(0.0, 1.0)


@settings(deadline=None)
@given(x=UNIT, boundary=UNIT, variance=st.floats(0.0, 0.25), rise=st.booleans())
def test_one_request_never_takes_more_than_98_percent(
    x: float, boundary: float, variance: float, rise: bool
) -> None:
    at, spread = np.array([boundary]), np.array([variance])
    bets = factors(np.array([x]), at, stakes(1.0 - at if rise else at, spread), rise=rise)
    assert np.isfinite(bets).all()
    assert bets.min() >= 0.02 - 1e-9


@settings(deadline=None)
@given(boundary=UNIT, variance=st.floats(0.0, 0.25), high=UNIT)
def test_a_bet_is_fair_at_the_boundary_whatever_the_distribution(
    boundary: float, variance: float, high: float
) -> None:
    """Two-point law on {0, value} with mean exactly the boundary: the expected factor is 1."""
    value = max(high, boundary)
    chance = boundary / value if value > 0 else 0.0
    at, spread = np.full(2, boundary), np.full(2, variance)
    bets = factors(np.array([0.0, value]), at, stakes(at, spread), rise=False)
    assert (1.0 - chance) * bets[0] + chance * bets[1] == pytest.approx(np.ones(BETS), abs=1e-6)


def test_stakes_follow_the_stated_formula() -> None:
    at, spread = np.array([0.6]), np.array([0.0144])
    expected = [min(delta / (0.0144 + delta**2), 0.98 / 0.4) for delta in DELTAS]
    assert stakes(at, spread)[0] == pytest.approx(expected)
    assert DELTAS[[0, -1]] == pytest.approx([0.01, 0.35])


def test_sum_is_a_bet_started_at_every_request() -> None:
    bets = np.random.default_rng(5).uniform(0.5, 1.6, (40, 3))
    products = [bets[start:].prod(axis=0) for start in range(len(bets))]
    assert run_sums(np.zeros(3), bets.copy())[-1] == pytest.approx(np.sum(products, axis=0))


def test_false_alarms_are_at_least_A_apart_where_the_null_is_tight() -> None:
    """x in {0, 1} with E[x] = m exactly, the least favourable case of the guarantee."""
    rng, boundary, wanted = np.random.default_rng(11), 0.6, 300.0
    times = []
    for _ in range(200):
        x = (rng.random(6_000) < boundary).astype(np.float64)
        at, spread = np.full(len(x), boundary), np.full(len(x), 0.24)
        evidence = mean_over_bets(run_sums(np.zeros(BETS), factors(x, at, stakes(at, spread), rise=False)))
        times.append(int(np.argmax(evidence >= wanted)) + 1 if (evidence >= wanted).any() else len(x))
    assert np.mean(times) >= wanted
    assert np.mean(times) < 10 * wanted  # a bet that never wins would prove nothing


def test_ranking_names_the_largest_k_that_passes() -> None:
    assert ranked(np.array([10.0, 120.0, 40.0, 1.0]), 100.0) == [1]
    assert ranked(np.array([10.0, 120.0, 60.0, 40.0]), 100.0) == [1, 2, 3]
    assert ranked(np.array([60.0, 51.0, 3.0]), 100.0) == [0, 1]
    assert ranked(np.array([60.0, 40.0]), 100.0) == []
