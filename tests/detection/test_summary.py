"""The expected delay against the real fold: medians over simulated drops, nothing fitted to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from driftguard.detection import (
    DetectorConfig,
    DriftOpened,
    ExpectedDelay,
    ObservationBatch,
    StreamState,
    describe,
    fold,
)
from driftguard.detection.statistics.baseline import Baselines, baselines
from driftguard.detection.summary import expected_requests
from tests.detection.statistics.test_windows import windows
from tests.detection.traffic import START, normal

# The formula is held against alarms that wait for nothing.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_stream_is_young")]

QUIET = DetectorConfig(false_alarm_every=1e12)
SEEDS = range(30)
DROPS = (0.05, 0.10, 0.20)
MEAN = 0.65


def requests(
    rng: np.random.Generator, mean: float, deviation: float, n: int, first: int = 1, segments: int = 1
) -> ObservationBatch:
    """Beta-distributed acceptance, one request per second, the segments in turn."""
    precision = mean * (1.0 - mean) / deviation**2 - 1.0
    drafted, ordinal = rng.integers(20, 200, n), np.arange(first, first + n)
    x = rng.beta(mean * precision, (1.0 - mean) * precision, n)
    names = [f"s{place % segments}" for place in range(n)]
    return ObservationBatch.of(
        ordinal, names, drafted, rng.binomial(drafted, x), START + ordinal.astype(np.float64)
    )


def watched(batch: ObservationBatch) -> StreamState:
    state, _ = fold(QUIET, StreamState(), batch)
    assert state.ready.all()
    return state


def expected(config: DetectorConfig, state: StreamState, drop: float) -> float | None:
    return expected_requests(config, state, baseline_of(state), 0, drop)


def baseline_of(state: StreamState) -> Baselines:
    return baselines(state.reference, state.inflation, state.measured_at, state.of_windows)


def alarm(config: DetectorConfig, state: StreamState, after: ObservationBatch) -> float:
    """Observations after the drop until the alarm."""
    start = state.ordinal
    for place in range(0, len(after), 100):  # most alarms come in the first
        state, findings = fold(config, state, after[place : place + 100])
        for finding in findings:
            if isinstance(finding, DriftOpened) and finding.direction == "down":
                return finding.ordinal - start
    return np.inf


def close(predicted: Sequence[float | None], simulated: Sequence[float], told: str) -> bool:
    known = np.array([value for value in predicted if value is not None])
    assert len(known) == len(predicted)
    ratio = float(np.median(known) / np.median(simulated))
    print(f"{told}: expected {np.median(known):.0f}, simulated median {np.median(simulated):.0f}")
    return 0.75 <= ratio <= 1.25


@pytest.mark.parametrize("deviation", [0.05, 0.12, 0.2])
def test_it_is_the_median_of_simulated_delays_within_a_quarter(deviation: float) -> None:
    configs = [DetectorConfig(false_alarm_every=every) for every in (1e4, 1e6)]
    found: dict[tuple[float, float], tuple[list[float | None], list[float]]] = {}
    for seed in SEEDS:
        rng = np.random.default_rng([71, seed])
        state = watched(requests(rng, MEAN, deviation, 2_500))
        for drop in DROPS:
            after = requests(rng, MEAN - drop, deviation, 4_000, first=2_501)
            for config in configs:
                cell = found.setdefault((config.false_alarm_every, drop), ([], []))
                cell[0].append(expected(config, state, drop))
                cell[1].append(alarm(config, state, after))
    print(f"seeds [71, 0..{len(SEEDS) - 1}], deviation {deviation}")
    far = [key for key, cell in found.items() if not close(*cell, told=f"A {key[0]:g}, drop {key[1]}")]
    assert far == []


def test_of_windows_too() -> None:
    config = DetectorConfig()
    for drop in DROPS:
        predicted: list[float | None] = []
        simulated = []
        for seed in SEEDS:
            rng = np.random.default_rng([72, seed])
            state = watched(windows(rng, [MEAN] * 40))
            predicted.append(expected(config, state, drop))
            simulated.append(alarm(config, state, windows(rng, [MEAN - drop] * 200, first_ordinal=41)))
        assert close(predicted, simulated, f"seeds [72, 0..29], windows, drop {drop}")
    (segment,) = describe(config, state).segments
    assert segment.expected_delays[0].text.startswith("a drop of 0.05: about ")
    assert "windows (" in segment.expected_delays[0].text


def in_sessions(
    rng: np.random.Generator, mean: float, n: int, *, first: int = 1, length: int, open_at_once: int
) -> ObservationBatch:
    """`length` requests each, so many sessions open at a time; half of the variance is between them. Not
    named where they follow one another."""
    group = open_at_once * length
    groups = [rng.permutation(group) // length + at * open_at_once for at in range(n // group + 1)]
    session = np.concatenate(groups)[:n]
    own = rng.normal(0.0, 0.085, session.max() + 1)[session]
    batch = normal(rng, mean + own, 0.085, first_ordinal=first)
    if open_at_once == 1:
        return batch
    return replace(batch, session=[f"{first} {number}" for number in session.tolist()])


@pytest.mark.parametrize(("length", "open_at_once", "least", "most"), [(8, 20, 1.0, 3.5), (10, 1, 0.6, 1.1)])
def test_of_sessions_the_alarm_comes_sooner_and_of_unnamed_ones_about_as_said(
    length: int, open_at_once: int, least: float, most: float
) -> None:
    config = DetectorConfig(false_alarm_every=1e4)
    predicted: list[float] = []
    simulated = []
    for seed in range(20):
        rng = np.random.default_rng([80, seed])
        state = watched(in_sessions(rng, MEAN, 10_000, length=length, open_at_once=open_at_once))
        assert bool(state.inflation[0] > 1.0) is (open_at_once == 1)
        after = in_sessions(rng, MEAN - 0.1, 2_000, first=10_001, length=length, open_at_once=open_at_once)
        found = expected(config, state, 0.1)
        assert found is not None
        predicted.append(found)
        simulated.append(alarm(config, state, after))
    ratio = float(np.median(predicted) / np.median(simulated))
    print(f"seeds [80, 0..19], sessions of {length}, {open_at_once} open: {ratio:.2f}")
    assert least <= ratio <= most


def test_with_other_segments_an_alarm_takes_twice_the_evidence() -> None:
    rng = np.random.default_rng(73)
    one = watched(requests(rng, MEAN, 0.12, 4_500))
    assert not one.growing.any()
    config = DetectorConfig()
    alone = expected(config, one, 0.1)
    # A stratum that another one joins has the baseline that it had, and the bets of the requests between.
    other = requests(rng, MEAN, 0.12, 300, first=4_501, segments=2)
    two, _ = fold(QUIET, one, other)
    twice = 2e5 * int(two.drafted_requests[0]) / 4_800
    doubled = expected(DetectorConfig(false_alarm_every=twice), one, 0.1)
    assert alone is not None
    assert expected(config, two, 0.1) == pytest.approx(doubled)
    assert doubled is not None
    assert doubled > alone


def test_a_drop_within_the_margin_is_not_detectable() -> None:
    state = watched(requests(np.random.default_rng(74), MEAN, 0.12, 1_500))
    config = DetectorConfig(ignore=0.06)
    assert expected(config, state, 0.05) is None
    assert expected(config, state, 0.06) is None
    assert expected(config, state, 0.10) is not None
    # Found later than a false alarm would come is not found.
    assert expected(DetectorConfig(false_alarm_every=100.0), state, 0.014) is None


def test_acceptance_cannot_fall_by_more_than_it_is() -> None:
    rare = watched(requests(np.random.default_rng(78), 0.08, 0.03, 2_500))
    counted = watched(windows(np.random.default_rng(79), [0.08] * 40))
    for state in (rare, counted):
        assert expected(DetectorConfig(), state, 0.05) is not None
        assert expected(DetectorConfig(), state, 0.10) is None


def test_the_status_gives_it_in_requests_and_in_time_at_the_measured_traffic() -> None:
    config = DetectorConfig()
    state = watched(requests(np.random.default_rng(75), MEAN, 0.12, 3_000, segments=2))
    for segment in describe(config, state).segments:
        small, large = segment.expected_delays
        assert (small.drop, large.drop) == (0.05, 0.10)
        assert small.requests is not None
        assert large.requests is not None
        assert small.requests > large.requests
        # One request per second, every other one of this segment.
        assert small.seconds == pytest.approx(2.0 * small.requests, rel=0.01)
    learning, _ = fold(config, StreamState(), requests(np.random.default_rng(76), MEAN, 0.12, 50))
    (segment,) = describe(config, learning).segments
    assert segment.expected_delays == ()
    unknown = ExpectedDelay(0.05, None, None)
    ignoring = DetectorConfig(ignore=0.3)
    assert describe(ignoring, state).segments[0].expected_delays[0] == unknown


def test_in_a_mix_of_settings_only_a_part_of_the_requests_tells() -> None:
    """Greedy and sampled requests have a baseline each: half of the requests, twice the wait."""
    rng = np.random.default_rng(77)
    batch = requests(rng, MEAN, 0.12, 3_000)
    temperature: NDArray[np.float64] = (np.arange(3_000) % 2).astype(np.float64)
    mixed = ObservationBatch.of(
        batch.ordinal, batch.segment, batch.drafted, batch.accepted, batch.ended_at, temperature=temperature
    )
    state = watched(mixed)
    (segment,) = describe(DetectorConfig(), state).segments
    own = expected(DetectorConfig(), state, 0.1)
    other = expected_requests(DetectorConfig(), state, baseline_of(state), 1, 0.1)
    assert own is not None
    assert other is not None
    assert segment.expected_delays[1].requests in (pytest.approx(2.0 * own), pytest.approx(2.0 * other))


@given(
    st.integers(0, 2**31),
    st.lists(
        st.tuples(st.floats(0.35, 0.85), st.floats(0.35, 0.85), st.integers(1, 400)), min_size=1, max_size=6
    ),
)
@settings(max_examples=25, deadline=None)
def test_no_segment_is_steady_against_its_own_interval(
    seed: int, parts: list[tuple[float, float, int]]
) -> None:
    """Whatever two segments do after their reference period, with and without open incidents."""
    rng = np.random.default_rng(seed)
    batch = requests(rng, MEAN, 0.12, 1_500, segments=2)
    state, _ = fold(DetectorConfig(minimum_drop=0.1), StreamState(), batch)
    for *means, n in parts:
        first = state.ordinal + 1
        for place, mean in enumerate(means):
            own = requests(rng, mean, 0.12, n, first=first + place * n)
            own = replace(own, segment=[f"s{place}"] * n)
            state, _ = fold(DetectorConfig(minimum_drop=0.1), state, own)
        for segment in describe(DetectorConfig(minimum_drop=0.1), state).segments:
            if segment.verdict == "steady":
                assert segment.baseline is not None
                assert segment.recent is not None
                assert segment.recent.low <= segment.baseline.rate <= segment.recent.high
