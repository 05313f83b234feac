from __future__ import annotations

import numpy as np

from driftguard.detection.statistics.sessions import KNOWN, REMEMBERED
from driftguard.detection.statistics.turns import (
    KEPT,
    LEARNED,
    LEVEL,
    NEWEST,
    OF_TURNS,
    REFERENCE,
    STEPS,
    TERMS,
    Floats,
    Turns,
    level_terms,
    looked_at,
    progress,
    progress_before,
    turn_terms,
    with_wandering,
)

WITHIN = 0.1


def sums_of(x: Floats) -> Floats:
    """Of sessions [N, turns] without lengths, all of them in the reference period and learned from."""
    sessions, turns = x.shape
    n = np.tile(np.arange(float(turns)), sessions)
    before = np.zeros((len(n), KNOWN))
    before[:, 0], before[:, 1] = n, (np.cumsum(x, axis=1) - x).ravel()
    before[:, 4:] = newest_of(x).reshape(-1, 2)
    sums = np.zeros((1, KEPT, OF_TURNS))
    sums[0, REFERENCE, :LEVEL] = level_terms(n, np.ones(len(n), dtype=np.bool_)).sum(axis=0)
    sums[0, LEARNED] = turn_terms(before, x.ravel(), np.zeros(len(n))).sum(axis=0)
    return sums


def newest_of(x: Floats) -> Floats:
    """Weight and weighted sum of the requests before each of sessions [N, turns]: [N, turns, 2]."""
    newest = np.zeros((*x.shape, 2))
    for turn in range(1, x.shape[1]):
        newest[:, turn] = (
            REMEMBERED * newest[:, turn - 1] + [[1.0, 0.0]] + x[:, turn - 1, None] * [[0.0, 1.0]]
        )
    return newest


def sums_before_last(x: Floats) -> Floats:
    """Of the last request of each session [N, KNOWN]."""
    before = np.zeros((len(x), KNOWN))
    before[:, 0], before[:, 1] = x.shape[1] - 1, x[:, :-1].sum(axis=1)
    before[:, 4:] = newest_of(x)[:, -1]
    return before


def turns_of(x: Floats) -> Turns:
    return Turns.of(sums_of(x), np.array([WITHIN**2]), np.zeros(1))


def at(turns: Turns, n: Floats, weight: float = 0.0, wandered: float = 0.0) -> tuple[Floats, Floats]:
    before = np.zeros((len(n), KNOWN))
    before[:, 0], before[:, 4], before[:, 5] = n, 1.0, wandered
    return turns.effect(np.zeros(len(n), dtype=np.intp), before, np.full(len(n), weight))


def effect_of(turns: Turns, before: Floats) -> Floats:
    return turns.effect(np.zeros(len(before), dtype=np.intp), before, np.ones(len(before)))[0]


def sessions(count: int, turns: int, fall: float) -> Floats:
    rng = np.random.default_rng(3)
    own = rng.normal(0.0, 0.2, (count, 1))  # that they differ must not matter
    return 0.6 + own - fall * np.arange(turns) / turns + rng.normal(0.0, WITHIN, (count, turns))


def test_the_sum_over_earlier_turns() -> None:
    n = np.arange(600.0)
    assert np.allclose(progress_before(n[1:]), np.cumsum(progress(n), axis=0)[:-1])
    assert (progress_before(n[:1]) == 0.0).all()


def test_a_fall_with_the_turn_is_learned_inside_sessions_that_differ() -> None:
    turns = turns_of(sessions(200, 40, 0.15))
    n = np.array([0.0, 10.0, 25.0, 39.0])
    effect, error = at(turns, n)
    true = 0.15 * ((40 - 1) / 2.0 - n) / 40.0
    assert (np.abs(effect - true) < 3.0 * error + 0.003).all()
    assert (error < 0.01).all()


def test_what_the_earlier_turns_of_the_session_tell_is_not_counted_twice() -> None:
    turns = turns_of(sessions(200, 40, 0.15))
    n = np.array([10.0, 39.0])
    effect, _ = at(turns, n, weight=1.0)
    assert np.allclose(effect, -0.15 * (n - (n - 1.0) / 2.0) / 40.0, atol=0.012)


def test_sessions_that_do_not_follow_the_turn_have_hardly_a_margin_for_it() -> None:
    turns = turns_of(sessions(400, 10, 0.0))
    effect, error = at(turns, np.arange(10.0))
    assert (np.abs(effect) < 0.001).all()
    assert (error < 0.002).all()


def test_turns_that_were_never_seen_may_follow() -> None:
    turns = turns_of(sessions(4, 10, 0.0))
    seen, never = at(turns, np.array([4.0, 64.0]))[1]
    assert never > 0.01
    assert never > 2.0 * seen


def wandering(count: int, turns: int, by: float) -> Floats:
    rng = np.random.default_rng(4)
    moves = np.cumsum(rng.normal(0.0, by, (count, turns)), axis=1)
    return 0.6 + moves + rng.normal(0.0, WITHIN, (count, turns))


def test_a_session_that_wanders_is_expected_to_be_like_its_newest_requests() -> None:
    x = wandering(400, 40, 0.02)
    turns, before = turns_of(x[:200]), sums_before_last(x[200:])
    last, of_all = x[200:, -1], before[:, 1] / before[:, 0]
    left = [np.mean((last - expected) ** 2) for expected in (of_all, of_all + effect_of(turns, before))]
    assert left[1] < 0.9 * left[0]
    effect, error = at(turns, np.array([30.0]), weight=1.0, wandered=0.1)
    assert effect[0] > 0.05
    assert error[0] < 0.01


def test_of_a_session_that_does_not_wander_the_newest_requests_tell_nothing_more() -> None:
    effect, error = at(turns_of(wandering(200, 40, 0.0)), np.array([30.0]), weight=1.0, wandered=0.1)
    assert abs(effect[0]) < 0.005
    assert error[0] < 0.01


def test_sums_of_before_know_the_turn_and_not_how_sessions_wander() -> None:
    known = sums_of(sessions(200, 40, 0.15))
    second = np.triu_indices(TERMS)[1]
    of_steps = np.concatenate([np.arange(LEVEL), LEVEL + np.flatnonzero(second < STEPS)])
    products = np.setdiff1d(np.arange(OF_TURNS - 2 * TERMS, OF_TURNS), [OF_TURNS - TERMS - 1, OF_TURNS - 1])
    kept = np.concatenate([of_steps, products])
    found = with_wandering(known[:, :, kept])
    assert (found[:, :, kept] == known[:, :, kept]).all()
    assert not np.delete(found, kept, axis=2).any()


def test_the_newest_are_learned_from_after_two_looks_and_lost_where_a_change_is_likely() -> None:
    sums = np.zeros((2, KEPT, OF_TURNS))
    sums[:, NEWEST] = 1.0
    steady, doubtful = np.array([False, False]), np.array([False, True])
    after = looked_at(looked_at(sums, steady), doubtful)
    assert (after[0, LEARNED] == 1.0).all()
    assert (after[1] == 0.0).all()


def test_a_state_of_before_takes_the_turns_since_for_those_of_its_reference_period() -> None:
    known = sums_of(sessions(50, 20, 0.1))
    before = known.copy()
    before[:, REFERENCE] = 0.0
    new, old = (Turns.of(sums, np.array([WITHIN**2]), np.zeros(1)) for sums in (known, before))
    assert np.allclose(new.middle, old.middle)
    assert new.middle.shape == (1, STEPS)
