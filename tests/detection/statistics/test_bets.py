from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftguard.detection.statistics.bets import (
    BETS,
    LARGEST_STAKE,
    NORMAL_CUT_OFF,
    REACH,
    STAKES,
    Floats,
    cut_off,
    factors,
    mean_over_bets,
    running_sums,
)
from driftguard.detection.steps.evidence import ranked

UNIT = st.floats(0.0, 1.0)


def sums_of_one(bets: Floats) -> Floats:
    """[T, W] of one stream from its beginning."""
    return running_sums(np.zeros((1, bets.shape[1])), np.zeros(len(bets), dtype=np.intp), bets)


@settings(deadline=None)
@given(
    x=UNIT,
    boundary=UNIT,
    variance=st.floats(0.0, 0.25),
    shown=UNIT,
    cut=st.one_of(st.none(), st.floats(0.0, 0.5)),
    rise=st.booleans(),
)
def test_one_request_never_takes_more_than_98_percent(
    x: float, boundary: float, variance: float, shown: float, cut: float | None, rise: bool
) -> None:
    at, spread, part = np.array([boundary]), np.array([variance]), np.array([shown])
    lost = None if cut is None else np.full(BETS, cut)
    bets = factors(np.array([x]), at, spread, rise=rise, shown=part, cut=lost)
    assert np.isfinite(bets).all()
    assert bets.min() >= 0.02 - 1e-9


@settings(deadline=None)
@given(boundary=UNIT, variance=st.floats(0.0, 0.25), high=UNIT)
def test_a_bet_is_fair_at_the_boundary_whatever_the_distribution(
    boundary: float, variance: float, high: float
) -> None:
    """A two-point distribution on {0, value} with mean exactly the boundary: the expected factor is 1."""
    value = max(high, boundary)
    chance = boundary / value if value > 0 else 0.0
    at, spread = np.full(2, boundary), np.full(2, variance)
    bets = factors(np.array([0.0, value]), at, spread, rise=False)
    assert (1.0 - chance) * bets[0] + chance * bets[1] == pytest.approx(np.ones(BETS), abs=1e-6)


@pytest.mark.parametrize("rise", [False, True])
@pytest.mark.parametrize("mean", [0.1, 0.5, 0.85])
def test_what_is_cut_off_is_made_up_for(mean: float, rise: bool) -> None:
    """Over the very requests that the cut was learned from the expected factor is 1, skewed or not."""
    x = np.random.default_rng(7).beta(8.0 * mean, 8.0 * (1.0 - mean), 2_000)
    cut = cut_off(x)[BETS:] if rise else cut_off(x)[:BETS]
    at, spread = np.full(len(x), x.mean()), np.full(len(x), x.var())
    assert (factors(x, at, spread, rise=rise, cut=cut)).mean(axis=0) == pytest.approx(np.ones(BETS), abs=1e-9)
    reached = np.minimum(REACH, (x.mean() if rise else 1.0 - x.mean()) / x.std())
    assert (STAKES * (reached + cut) <= 1.1 * LARGEST_STAKE).all()


def test_where_acceptance_is_low_a_cut_allows_the_stake_that_a_fall_needs() -> None:
    """At .2 an uncut bet could put .98 / .8 on a fall; sd .1 calls for up to .9 / .1."""
    x = np.array([0.1])
    at, spread = np.array([0.2]), np.array([0.01])
    cut = factors(x, at, spread, rise=False, cut=NORMAL_CUT_OFF[:BETS])[0]
    uncut = factors(x, at, spread, rise=False)[0]
    assert uncut.max() == pytest.approx(1.0 + 0.98 / 0.8 * 0.1)
    assert cut[STAKES == 0.42] == pytest.approx(1.42, abs=0.01)


def test_sum_is_a_bet_started_at_every_request() -> None:
    bets = np.random.default_rng(5).uniform(0.5, 1.6, (40, 3))
    products = [bets[start:].prod(axis=0) for start in range(len(bets))]
    assert sums_of_one(bets)[-1] == pytest.approx(np.sum(products, axis=0))


def test_false_alarms_are_at_least_A_apart_where_the_null_is_tight() -> None:
    """x in {0, 1} with E[x] = m exactly, the least favourable case of the guarantee."""
    rng, boundary, wanted = np.random.default_rng(11), 0.6, 300.0
    times = []
    for _ in range(200):
        x = (rng.random(6_000) < boundary).astype(np.float64)
        at, spread = np.full(len(x), boundary), np.full(len(x), 0.24)
        evidence = mean_over_bets(sums_of_one(factors(x, at, spread, rise=False)))
        times.append(int(np.argmax(evidence >= wanted)) + 1 if (evidence >= wanted).any() else len(x))
    assert np.mean(times) >= wanted
    assert np.mean(times) < 10 * wanted  # a bet that never wins would prove nothing


def test_ranking_names_the_largest_k_that_passes() -> None:
    assert ranked(np.array([10.0, 120.0, 40.0, 1.0]), 100.0) == [1]
    assert ranked(np.array([10.0, 120.0, 60.0, 40.0]), 100.0) == [1, 2, 3]
    assert ranked(np.array([60.0, 51.0, 3.0]), 100.0) == [0, 1]
    assert ranked(np.array([60.0, 40.0]), 100.0) == []
