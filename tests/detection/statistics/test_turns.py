from __future__ import annotations

import numpy as np

from driftguard.detection.statistics.sessions import KNOWN
from driftguard.detection.statistics.turns import (
    KEPT,
    LEARNED,
    LEVEL,
    NEWEST,
    OF_TURNS,
    REFERENCE,
    STEPS,
    Floats,
    Turns,
    level_terms,
    looked_at,
    progress,
    progress_before,
    turn_terms,
)

WITHIN = 0.1


def sums_of(x: Floats) -> Floats:
    """Of sessions [N, turns] without lengths, all of them in the reference period and learned from."""
    sessions, turns = x.shape
    n = np.tile(np.arange(float(turns)), sessions)
    before = np.zeros((len(n), KNOWN))
    before[:, 0], before[:, 1] = n, (np.cumsum(x, axis=1) - x).ravel()
    sums = np.zeros((1, KEPT, OF_TURNS))
    sums[0, REFERENCE, :LEVEL] = level_terms(n, np.ones(len(n), dtype=np.bool_)).sum(axis=0)
    sums[0, LEARNED] = turn_terms(before, x.ravel(), np.zeros(len(n))).sum(axis=0)
    return sums


def turns_of(x: Floats) -> Turns:
    return Turns.of(sums_of(x), np.array([WITHIN**2]), np.zeros(1))


def at(turns: Turns, n: Floats, weight: float = 0.0) -> tuple[Floats, Floats]:
    return turns.effect(np.zeros(len(n), dtype=np.intp), n, np.full(len(n), weight))


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
    assert turns.likely[0] > 0.999
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
    assert turns.likely[0] < 0.05
    assert (np.abs(effect) < 0.001).all()
    assert (error < 0.002).all()


def test_turns_that_were_never_seen_may_follow() -> None:
    turns = turns_of(sessions(4, 10, 0.0))
    seen, never = at(turns, np.array([4.0, 64.0]))[1]
    assert never > 0.01
    assert never > 2.0 * seen


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
