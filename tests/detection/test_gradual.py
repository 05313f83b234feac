"""A change that comes bit by bit: its onset is told, with an interval that holds it."""

from __future__ import annotations

from datetime import UTC, datetime

import numpy as np
import pytest

from driftguard.detection.state.codec import encode_state
from driftguard.detection.statistics.ramp import Moves, fit, steady_clock
from driftguard.records.documents.acceptance import Gradual
from tests.detection.ramps import CONFIG, DAY, Fall, found, simulate
from tests.detection.traffic import fold_all

FIRST_SEED, RUNS = 31_000, 24


@pytest.mark.slow
def test_what_is_told_holds_the_onset_of_ramps_of_an_hour_to_a_week() -> None:
    ramps = (
        Fall(rate=300, hours=1, drop=0.2),
        Fall(rate=300, hours=6, drop=0.1, silent_nights=True),
        Fall(rate=60, hours=24, drop=0.1, silent_nights=True),
        Fall(rate=100, hours=72, drop=0.1, silent_nights=True, rare=True),
        Fall(rate=40, hours=168, drop=0.2, silent_nights=True, rare=True),
    )
    for ramp in ramps:
        runs = [found(ramp, FIRST_SEED + number) for number in range(RUNS)]
        held = [run.held for run in runs if run is not None]
        assert len(held) >= RUNS - 2, ramp
        # At a coverage of .9, fewer than 19 of 24 have a chance of one in fifty.
        assert sum(held) >= 0.79 * len(held), (ramp, sum(held), len(held))


@pytest.mark.slow
def test_steps_are_rarely_called_gradual() -> None:
    steps = (
        Fall(rate=60, hours=0, drop=0.05),
        Fall(rate=60, hours=0, drop=0.1, silent_nights=True),
        Fall(rate=60, hours=0, drop=0.1, silent_nights=True, rare=True),
    )
    runs = [run for step in steps for number in range(RUNS) if (run := found(step, FIRST_SEED + number))]
    # At one in twenty, more than 7 of 72 have a chance of one in forty.
    assert sum(run.certain for run in runs) <= 7
    assert sum(run.held for run in runs) >= 0.85 * len(runs)


def falling(rng: np.random.Generator, seconds: np.ndarray, onset: float, per_second: float) -> Moves:
    """Of two strata, of which one is rare."""
    moved = -per_second * np.maximum(seconds - onset, 0.0)
    return Moves(
        seconds=seconds,
        residual=moved + rng.normal(0.0, 0.1, len(seconds)),
        shown=np.ones(len(seconds)),
        variance=np.full(len(seconds), 0.01),
        stratum=(rng.random(len(seconds)) < 0.05).astype(np.intp),
        level_error=np.array([0.005, 0.02]),
    )


def test_a_long_ramp_is_found_with_its_onset_and_its_height() -> None:
    rng = np.random.default_rng(5)
    seconds = np.sort(rng.uniform(0.0, 10 * DAY, 6_000))
    ramp = fit(falling(rng, seconds, 6 * DAY, 0.03 / DAY), 0.0, rise=False)
    assert ramp is not None
    assert ramp.certain
    assert ramp.first <= 6 * DAY <= ramp.last
    assert ramp.onset == pytest.approx(6 * DAY, abs=0.5 * DAY)
    assert ramp.moved == pytest.approx(-0.12, abs=0.02)


def test_an_onset_before_the_history_is_found_by_continuing_the_line() -> None:
    rng = np.random.default_rng(6)
    seconds = np.sort(rng.uniform(4 * DAY, 10 * DAY, 8_000))
    ramp = fit(falling(rng, seconds, 2 * DAY, 0.02 / DAY), 0.0, rise=False)
    assert ramp is not None
    assert ramp.certain
    assert ramp.first <= 2 * DAY <= ramp.last < 4 * DAY


def test_a_rise_is_no_fall_and_one_moment_is_no_ramp() -> None:
    rng = np.random.default_rng(7)
    seconds = np.sort(rng.uniform(0.0, DAY, 3_000))
    rise = fit(falling(rng, seconds, 0.5 * DAY, -0.2 / DAY), 0.0, rise=True)
    assert rise is not None
    assert rise.moved > 0.0
    assert fit(falling(rng, np.full(100, 5.0), 0.0, 0.0), 5.0, rise=False) is None


def test_a_clock_that_lies_now_and_then_moves_nothing() -> None:
    true = np.arange(0.0, 1_000.0)
    told = true.copy()
    told[[100, 500]] += 1e8
    told[[300, 301]] -= 1e8
    steady = steady_clock(told)
    assert (np.diff(steady) >= 0.0).all()
    assert np.abs(steady - true).max() <= 5.0


def test_a_ramp_is_told_alike_however_batched() -> None:
    batch, _ = simulate(Fall(rate=100, hours=72, drop=0.2, silent_nights=True, rare=True), FIRST_SEED)
    whole = fold_all(batch[:9_000], CONFIG)
    pieces = fold_all(batch[:4_321], CONFIG)
    later = fold_all(batch[4_321:9_000], CONFIG, pieces[0])
    assert encode_state(later[0]) == encode_state(whole[0])
    assert [*pieces[1], *later[1]] == whole[1]


@pytest.mark.parametrize(
    ("per_day", "text"), [(-0.024, "0.02 a day"), (-1.2, "0.05 an hour"), (0.004, "0.004 a day")]
)
def test_a_rate_is_told_per_day_or_per_hour(per_day: float, text: str) -> None:
    at = datetime(2026, 11, 20, tzinfo=UTC)
    assert Gradual(1, at, (at, at), 0.0, per_day, True).rate == text
