"""e-BH over streams: by hand, by simulation, and against one threshold per stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from driftguard.detection import (
    DetectorConfig,
    DriftOpened,
    Finding,
    Fleet,
    Folded,
    StreamState,
    fold,
    fold_fleet,
)
from driftguard.detection.fleet import evidence_share, step_up
from driftguard.detection.observations import ObservationBatch
from driftguard.detection.state.codec import encode_state
from driftguard.detection.steps.evidence import without_evidence
from tests.detection.traffic import requests

# An A of 100 requests has passed long before a stream is old.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_stream_is_young")]

STREAMS = 50
LEARNING = 2_500  # requests of each stream, the last of which are watched
ROUND = 50  # requests of each stream in one batch
CONFIG = DetectorConfig(false_alarm_every=100.0, minimum_drop=0.03)


@pytest.mark.parametrize(
    ("shares", "streams", "factor"),
    [
        ([], 10, None),
        ([9.9], 10, None),
        ([10.0], 10, 10.0),
        ([5.0, 4.9], 10, None),
        ([5.0, 5.0, 0.0], 10, 5.0),
        ([20.0, 3.4, 3.4], 10, 10 / 3),  # the second alone would need 5: the third helps it
        ([20.0, 3.4, 3.2], 10, 10.0),
        ([1.0] * 10, 10, 1.0),
    ],
)
def test_step_up_by_hand(shares: list[float], streams: int, factor: float | None) -> None:
    assert step_up(shares, streams) == factor


def test_a_stream_needs_less_the_more_others_are_named() -> None:
    assert Fleet(100, {}).factor() == 100.0
    assert Fleet(100, {1: 100.0}).factor() == 50.0
    assert Fleet(100, {1: 100.0, 2: 50.0}).factor() == pytest.approx(100 / 3)
    assert Fleet(100, {1: 100.0, 2: 50.0}).factor(stream=2) == 50.0  # its own naming does not help it
    assert Fleet(100, {1: 49.0}).factor() == 100.0  # the stream that it was named with has closed


def test_one_stream_alone_is_folded_as_ever() -> None:
    batch = rounds([0.7] * 600 + [0.5] * 200, seed=1)
    (folded,) = fold_fleet(CONFIG, Fleet(1, {}), {7: StreamState()}, {7: batch}).values()
    state, findings = fold(CONFIG, StreamState(), batch)
    assert encode_state(folded.state) == encode_state(state)
    assert (folded.findings, folded.factor) == (findings, 1.0)


def test_evidence_reaches_the_share_that_the_alarm_asks_for() -> None:
    """The share is what the fold compares with A, so both agree on when it is 1."""
    batch = rounds([0.7] * 1500 + [0.5] * 100, seed=2)
    _, findings = fold(CONFIG, StreamState(), batch)
    (opened,) = [finding for finding in findings if isinstance(finding, DriftOpened)]
    before, _ = fold(CONFIG, StreamState(), batch[: opened.ordinal - 1])
    high = CONFIG.times(1e6)
    at, _ = fold(high, StreamState(), batch[: opened.ordinal])
    assert evidence_share(CONFIG, before) < 1.0
    assert evidence_share(CONFIG, at) == pytest.approx(opened.evidence / CONFIG.false_alarm_every)


def test_streams_that_changed_together_are_named_together() -> None:
    """Three of them reach 10 x A / 3, and none 10 x A / 2: they are named in the batch where that is so."""
    config = DetectorConfig(minimum_drop=0.03)
    before = learned(config, seed=3)
    after = drawn(3, LEARNING, 0.62, amount=20 * ROUND)
    states, parts = [before], [after[end - 2 : end] for end in range(2, len(after), 2)]
    for part in parts:
        states.append(fold(config.times(10), states[-1], part)[0])
        if evidence_share(config, states[-1]) >= 10 / 3:
            break
    assert evidence_share(config, states[-1]) < 10 / 2  # so that two of them are not enough

    def folded(stream_count: int, at: int) -> list[Folded]:
        streams = range(stream_count)
        batches = dict.fromkeys(streams, parts[at])
        return list(fold_fleet(config, Fleet(10, {}), dict.fromkeys(streams, states[at]), batches).values())

    crossing = len(states) - 2
    assert [item.findings for item in folded(3, crossing - 1)] == [[], [], []]
    assert [item.findings for item in folded(2, crossing)] == [[], []]
    for item in folded(3, crossing):
        (finding,) = item.findings
        assert isinstance(finding, DriftOpened)
        assert finding.false_alarm_every == pytest.approx(config.false_alarm_every * 10 / 3)


@pytest.fixture(scope="module")
def many() -> dict[int, StreamState]:
    return {stream: learned(CONFIG, seed=stream) for stream in range(STREAMS)}


def test_the_first_false_page_of_many_streams_comes_as_late_as_stated(many: dict[int, StreamState]) -> None:
    """A is 100 requests of each stream: one false page of all 50 together in that time, at most."""
    together = [first_page(many, together=True, seed=seed) for seed in range(4)]
    each = [first_page(many, together=False, seed=seed) for seed in range(4)]
    assert np.mean(together) >= CONFIG.false_alarm_every
    assert np.mean(each) < CONFIG.false_alarm_every  # what the other scope means to an operator of 50 streams


def test_the_more_streams_changed_the_sooner_they_are_named() -> None:
    """Against the threshold N x A for each of them (Bonferroni), on the same requests."""
    config = DetectorConfig(false_alarm_every=1_000.0, minimum_drop=0.03)
    changed = 25
    states = {stream: learned(config, seed=stream) for stream in range(changed)}
    alone, together = {}, {}
    for stream, state in states.items():
        _, findings = fold(config.times(STREAMS), state, drawn(stream, LEARNING, 0.64, amount=1000))
        alone[stream] = delay(findings)
    named: dict[int, float] = {}
    for end in range(LEARNING, LEARNING + 1000, ROUND):
        batches = {stream: drawn(stream, end, 0.64) for stream in states}
        folded = fold_fleet(config, Fleet(STREAMS, named), states, batches)
        for stream, item in folded.items():
            states[stream] = item.state
            if item.findings and stream not in named:
                together[stream], named[stream] = delay(item.findings), item.factor
    assert all(together[stream] <= alone[stream] for stream in alone)
    assert np.mean(list(together.values())) < 0.9 * np.mean(list(alone.values()))


def test_named_streams_that_did_not_change_stay_a_small_part(many: dict[int, StreamState]) -> None:
    """E[false among the named] <= watched time / D: after 300 requests of each, with D = 3,000."""
    config = replace(CONFIG, false_alarm_every=3_000.0)
    parts = []
    for seed in range(3):
        states, named = dict(many), dict[int, float]()
        for start in range(LEARNING, LEARNING + 300, 2 * ROUND):
            batches = {
                stream: drawn(1000 * seed + stream, start, 0.5 if stream < 10 else 0.7, 2 * ROUND)
                for stream in states
            }
            for stream, item in fold_fleet(config, Fleet(STREAMS, named), states, batches).items():
                states[stream] = item.state
                if any(isinstance(finding, DriftOpened) for finding in item.findings):
                    named[stream] = item.factor
        assert sum(stream < 10 for stream in named) == 10
        parts.append(sum(stream >= 10 for stream in named) / len(named))
    assert np.mean(parts) <= 300 / 3_000


def rounds(means: Sequence[float], seed: int, first_ordinal: int = 1) -> ObservationBatch:
    return requests(np.random.default_rng(seed), np.array(means), first_ordinal=first_ordinal)


def drawn(stream: int, start: int, mean: float, amount: int = ROUND) -> ObservationBatch:
    """The requests of a stream after the first `start`; the same however they are cut into rounds."""
    parts = [
        rounds([mean] * ROUND, seed=10_000 * stream + place, first_ordinal=place + 1)
        for place in range(start, start + amount, ROUND)
    ]
    return joined(parts)


def joined(parts: Sequence[ObservationBatch]) -> ObservationBatch:
    names = ("ordinal", "segment", "drafted", "accepted", "ended_at")
    columns = {name: [value for part in parts for value in getattr(part, name)] for name in names}
    return ObservationBatch.of(*columns.values())


def learned(config: DetectorConfig, seed: int) -> StreamState:
    high = config.times(1e6)  # so that no alarm comes before the test begins
    state, _ = fold(high, StreamState(), rounds([0.7] * LEARNING, seed=900_000 + seed))
    assert state.ready.all()
    return without_evidence(without_evidence(state, 0), 1)


def first_page(prepared: Mapping[int, StreamState], *, together: bool, seed: int) -> int:
    """Requests of each stream until the first alarm of any, while nothing changes; counted up to 500."""
    states = dict(prepared)
    for watched in range(0, 500, 5 * ROUND):
        findings: list[Finding] = []
        batches = {
            stream: drawn(1000 * seed + stream, LEARNING + watched, 0.7, 5 * ROUND) for stream in states
        }
        if together:
            for stream, item in fold_fleet(CONFIG, Fleet(STREAMS, {}), states, batches).items():
                states[stream] = item.state
                findings += item.findings
        else:
            for stream, batch in batches.items():
                states[stream], found = fold(CONFIG, states[stream], batch)
                findings += found
        if alarms := [finding.ordinal for finding in findings if isinstance(finding, DriftOpened)]:
            return min(alarms) - LEARNING
    return 500


def delay(findings: Sequence[object]) -> int:
    (finding,) = [finding for finding in findings if isinstance(finding, DriftOpened)]
    return finding.ordinal - LEARNING


def test_the_largest_settings_stay_legal_however_many_streams_there_are() -> None:
    times = DetectorConfig(false_alarm_days=1e8).times(50.0)
    assert times.threshold(1e9) == times.threshold(1e6) == 1e15
