"""Alarms of young streams: requests of users that nothing names, and changes that last."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from driftguard.detection import DetectorConfig, DriftOpened, Finding, StreamState, describe, fold
from driftguard.detection.state.codec import decode_state, encode_state
from driftguard.detection.statistics.baseline import baselines
from driftguard.detection.steps.confirmation import LOOKS
from driftguard.detection.steps.dependence import YOUNG, YOUNG_DEPENDENT
from driftguard.detection.summary import expected_requests
from tests.benchmarks.detection.dependent import DEPENDENT, INDEPENDENT
from tests.benchmarks.detection.traffic import Change
from tests.detection.traffic import fold_all

CONFIG = DetectorConfig()
USERS = next(family for family in DEPENDENT if family.name.startswith("users"))
STREAMS, LENGTH, RUNS, READY = 20, 4_000, 8, 500


def opened(findings: list[Finding]) -> list[DriftOpened]:
    return [finding for finding in findings if isinstance(finding, DriftOpened)]


def delays(at: int, drop: float) -> list[int]:
    """Of independent requests that fall after `at` of them; those found."""
    found = []
    for seed in range(RUNS):
        batch = INDEPENDENT.batch([612, seed], at + YOUNG_DEPENDENT + 1_000, Change(at, drop))
        falls = [each for each in opened(fold_all(batch)[1]) if each.ordinal > at]
        found += [falls[0].ordinal - at] if falls and falls[0].direction == "down" else []
    print(f"seeds [612, 0..{RUNS - 1}], {drop} after {at}: {sorted(found)}")
    return found


def test_users_that_differ_raise_hardly_an_alarm_in_young_streams() -> None:
    """One in five streams at most; of 40 there were 23."""
    batches = [USERS.batch([611, seed], LENGTH) for seed in range(STREAMS)]
    alarms = [len(opened(fold_all(batch)[1])) for batch in batches]
    print(f"seeds [611, 0..{STREAMS - 1}]: {sum(alarms)} alarms in {STREAMS} streams")
    assert sum(alarms) <= STREAMS / 5


def test_a_stream_is_as_old_as_its_own_requests_whatever_other_streams_have_sent_between_them() -> None:
    for seed in range(4):
        batch = USERS.batch([611, seed], LENGTH)
        alone, beside = (fold_all(replace(batch, ordinal=batch.ordinal * apart))[1] for apart in (1, 100))
        assert [each.ordinal for each in opened(beside)] == [100 * each.ordinal for each in opened(alone)]


def test_a_large_fall_of_a_young_stream_is_told_at_once() -> None:
    found = delays(700, 0.2)
    assert len(found) == RUNS
    assert np.median(found) <= 60


@pytest.mark.slow
def test_a_small_fall_of_a_young_stream_waits_until_it_is_no_longer_young_and_is_not_swallowed() -> None:
    found = delays(1_000, 0.05)
    assert len(found) == RUNS
    assert max(found) <= YOUNG_DEPENDENT + READY + 100 - 1_000
    assert len(delays(700, 0.1)) == RUNS


def test_a_segment_that_comes_late_does_not_wait_where_the_others_are_independent() -> None:
    """One request in ten, from the 3,000th on, that accepts .2 less after 550 of its own. With an age of its
    own it was young for 150 of them more."""
    waited = []
    for seed in range(RUNS):
        batch = INDEPENDENT.batch([615, seed], 11_000)
        late = (np.arange(len(batch)) >= 3_000) & (
            np.random.default_rng([616, seed]).random(len(batch)) < 0.1
        )
        fall_at = int(np.flatnonzero(late)[550])
        fallen = late & (np.arange(len(batch)) >= fall_at)
        accepted = batch.accepted - np.where(fallen, np.minimum(batch.drafted // 5, batch.accepted), 0)
        segments = np.where(late, "late", "usual").tolist()
        findings = opened(fold_all(replace(batch, segment=segments, accepted=accepted))[1])
        found = next(each for each in findings if each.ordinal > fall_at)
        assert found.direction == "down"
        waited.append(int(late[fall_at : found.ordinal].sum()))
    print(f"seeds [615, 0..{RUNS - 1}]: {sorted(waited)} requests of the segment")
    assert np.median(waited) <= 25


def test_a_segment_says_that_its_alarm_waits_and_for_how_long() -> None:
    batch = INDEPENDENT.batch([612, 3], 4_000, Change(1_000, 0.05))
    alarm = opened(fold_all(batch)[1])[0].ordinal
    state, _ = fold_all(batch[:1_000])
    assert describe(CONFIG, state).segments[0].alarm_waits is None
    state, _ = fold_all(batch[: alarm - 100])
    (segment,) = describe(CONFIG, state).segments
    assert segment.verdict == "off_baseline"
    assert segment.alarm_waits is not None
    assert segment.alarm_waits == pytest.approx(100, abs=alarm / LOOKS + 1)
    state, _ = fold_all(batch[:alarm])
    assert describe(CONFIG, state).segments[0].alarm_waits is None


def expected(state: StreamState, drop: float) -> float:
    base = baselines(state.reference, state.inflation, state.measured_at, state.of_windows)
    return expected_requests(CONFIG, state, base, 0, drop) or np.inf


def test_the_delay_to_expect_includes_what_the_alarm_waits_for() -> None:
    state, _ = fold_all(INDEPENDENT.batch([613], 1_000))
    assert 1_000 < expected(state, 0.05) < YOUNG
    assert expected(state, 0.2) < 60
    state, _ = fold_all(INDEPENDENT.batch([613], 4_000))
    assert expected(state, 0.05) < 250


def test_an_alarm_that_waits_does_not_depend_on_batches_or_restarts() -> None:
    batch = INDEPENDENT.batch([612, 0], 3_500, Change(1_000, 0.05))
    whole, findings = fold(CONFIG, StreamState(), batch)
    assert opened(findings)
    cuts = np.random.default_rng(614).choice(np.arange(1, len(batch)), 120, replace=False)
    state, found = StreamState(), list[Finding]()
    for start, stop in pairwise([0, *sorted(cuts.tolist()), len(batch)]):
        state, some = fold(CONFIG, decode_state(encode_state(state)), batch[start:stop])
        found += some
    assert found == findings
    assert encode_state(state) == encode_state(whole)
