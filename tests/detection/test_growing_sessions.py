"""Named sessions whose acceptance falls with the turn."""

from __future__ import annotations

import numpy as np
import pytest

from driftguard.detection import BaselineReady, DriftOpened, ObservationBatch
from driftguard.detection.statistics.turns import Turns
from tests.detection.traffic import fold_all, growing_sessions


@pytest.mark.parametrize("seed", range(4))
def test_a_fall_with_the_turn_is_no_change_where_sessions_begin_together(seed: int) -> None:
    """The baseline is that of first turns, and all sessions grow at the same time."""
    batch = growing_sessions(seed, 2_000, falls=0.08, turns=50, open_at_once=20, between=0.0)
    assert not _opened(batch)


def test_a_fall_with_the_turn_is_no_change_where_sessions_differ() -> None:
    """A stream may have one false alarm in 100,000 requests: one of these eight has, with a chance of .4."""
    traffic = (
        growing_sessions(seed, 6_500, falls=0.15, turns=50, open_at_once=8, between=0.05) for seed in range(8)
    )
    assert sum(bool(_opened(batch)) for batch in traffic) <= 2


def test_sessions_that_follow_the_turn_each_in_its_own_way_are_no_change() -> None:
    """One of these streams has a false alarm with a chance of 1/2; it is seen in most if all that a session
    accepted before counts alike."""
    traffic = (
        growing_sessions(seed, 14_000, falls=0.0, turns=50, open_at_once=8, between=0.05, slopes_differ=0.15)
        for seed in range(5)
    )
    assert sum(bool(_opened(batch)) for batch in traffic) <= 1


@pytest.mark.parametrize("seed", range(3))
def test_a_change_is_found_beside_a_fall_with_the_turn(seed: int) -> None:
    batch = growing_sessions(
        seed, 3_500, falls=0.08, turns=50, open_at_once=20, between=0.0, drop=(3_000, 0.1)
    )
    first, *_ = _opened(batch)
    assert first.direction == "down"
    assert 3_000 < first.ordinal < 3_250


def test_a_fall_while_a_baseline_is_learned_is_not_taken_for_sessions_that_wander() -> None:
    batch = growing_sessions(1, 4_000, falls=0.0, turns=50, open_at_once=8, between=0.05, drop=(150, 0.15))
    state, findings = fold_all(batch[:1_200])
    ready, opened, *_ = findings
    assert isinstance(ready, BaselineReady)
    assert ready.why.before_fall
    assert isinstance(opened, DriftOpened)
    known = Turns.of(state.turns, np.array([0.1**2]), np.zeros(1))
    session = np.array([[30.0, 18.0, 0.0, 200.0, 12.0, 12.0 * 0.7]])  # its newest .1 above all of it
    effect, _ = known.effect(np.zeros(1, dtype=np.intp), session, np.ones(1))
    assert abs(effect.item()) < 0.02


def _opened(batch: ObservationBatch) -> list[DriftOpened]:
    return [finding for finding in fold_all(batch)[1] if isinstance(finding, DriftOpened)]
