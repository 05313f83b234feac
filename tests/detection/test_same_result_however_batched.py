"""Folding is a function of the records alone: not of batches, restarts, or luck with odd values."""

from __future__ import annotations

import re
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from driftguard.detection import (
    BaselineReady,
    DetectorConfig,
    DriftClosed,
    DriftOpened,
    Finding,
    ObservationBatch,
    StreamState,
    accept_new_normal,
    describe,
    fold,
)
from driftguard.detection.state.codec import decode_state, encode_state
from driftguard.detection.steps.dependence import measured
from tests.detection.traffic import growing_sessions, requests

QUICK = DetectorConfig(false_alarm_every=100.0, minimum_drop=0.4, ignore=0.0, history=256)
COUNT = st.integers(0, 2**62)
ALIKE = st.tuples(  # a run of equal records
    st.sampled_from(["a", "b", "other", "ü"]),
    COUNT | st.integers(0, 8),
    COUNT | st.integers(0, 8),
    st.floats(-6e10, 2e11, allow_nan=False),
    st.integers(1, 1_000),  # distance of ordinals
    st.integers(1, 200),  # how many
)


def in_parts(
    config: DetectorConfig, batch: ObservationBatch, cuts: list[int], *, restart: bool
) -> tuple[bytes, list[Finding]]:
    state, findings = StreamState(), []
    for start, stop in zip([0, *cuts], [*cuts, len(batch)], strict=True):
        state, found = fold(config, state, batch[start:stop])
        if restart:
            state = decode_state(encode_state(state))
        findings += found
    return encode_state(state), findings


def eventful(n: int = 6_000) -> ObservationBatch:
    """Falls, rises and recoveries in four segments, some requests without drafted tokens."""
    rng = np.random.default_rng(8)
    code = rng.integers(0, 4, n)
    means = np.array([0.7, 0.5, 0.8, 0.6])[code]
    when = np.arange(n)
    means = np.where((code == 1) & (when > 2_500) & (when < 3_600), 0.25, means)
    means = np.where((code == 2) & (when > 2_800) & (when < 4_000), 0.95, means)
    means = np.where((code < 2) & (when > 5_200), 0.4, means)
    batch = requests(rng, means, [f"segment {number}" for number in code])
    idle = rng.random(n) < 0.05
    batch.drafted[idle] = 0
    batch.accepted[idle] = 0
    return batch


def of_sessions(good: int, fallen: int, again: int) -> ObservationBatch:
    """Four requests of a session in turn, of which some fall by .5."""
    rng, number = np.random.default_rng(1), np.arange(good + fallen + again)
    session = number // 4
    means = 0.7 - 0.5 * ((number >= good) & (number < good + fallen))
    means += rng.normal(0.0, 0.05, len(number))[session] + rng.normal(0.0, 0.1, len(number))
    drafted = rng.integers(80, 300, len(number))
    accepted = rng.binomial(drafted, np.clip(means, 0.005, 0.995))
    names = [f"session {each}" for each in session]
    of = ["s"] * len(number)
    ended = (1.7e9 + 2.0 * number).tolist()
    return ObservationBatch.of(number + 1, of, drafted, accepted, ended, session=names)


def test_a_large_fall_of_sessions_at_once() -> None:
    """As after an outage. Its evidence is beyond all numbers while the incident is open."""
    batch, config = of_sessions(2_500, 2_000, 200), DetectorConfig()
    before = [*range(50, 2_600, 50)]
    little = in_parts(config, batch, [*before, *range(2_600, len(batch), 50)], restart=False)
    assert [type(finding) for finding in little[1]] == [BaselineReady, DriftOpened, DriftClosed]
    assert in_parts(config, batch, [*before, 2_600], restart=True) == little


def test_sessions_that_fall_with_the_turn() -> None:
    config, change = DetectorConfig(), (3_500, 0.2)
    batch = growing_sessions(3, 4_000, falls=0.1, turns=20, open_at_once=6, between=0.05, drop=change)
    whole = in_parts(config, batch, [], restart=False)
    assert [type(finding) for finding in whole[1]][-1] is DriftOpened
    assert in_parts(config, batch, [700, 701, 1_500, 2_611, 3_510], restart=True) == whole
    assert in_parts(config, batch, [*range(1, 300), *range(1_500, 1_700)], restart=False) == whole


@pytest.mark.slow
def test_one_by_one_in_batches_and_across_restarts() -> None:
    batch, config = eventful(), DetectorConfig(minimum_drop=0.1, false_alarm_every=1_000.0)
    whole = in_parts(config, batch, [], restart=False)
    kinds = [type(finding) for finding in whole[1]]
    assert kinds.count(BaselineReady) == 4
    assert kinds.count(DriftOpened) >= 3
    assert kinds.count(DriftClosed) >= 2
    rng = np.random.default_rng(9)
    cuts = sorted(rng.choice(np.arange(1, len(batch)), 60, replace=False).tolist())
    assert in_parts(config, batch, cuts, restart=True) == whole
    singly = [*range(1, 700), *range(2_400, 3_900)]  # around the references, two changes and their ends
    assert in_parts(config, batch, singly, restart=False) == whole


def with_odd_columns(batch: ObservationBatch) -> ObservationBatch:
    """Settings, sessions, lengths and starts that change in runs and at random."""
    n = len(batch)
    rng = np.random.default_rng(n)
    run = np.repeat(rng.integers(0, 2**31, n // 40 + 1), 40)[:n]  # one number for 40 records
    return replace(
        batch,
        session=[
            None if number % 3 == 0 else f"s{number % 7}\ud800" for number in run + rng.integers(0, 2, n)
        ],
        kind=["window" if number % 2 else "request" for number in run],
        num_speculative_tokens=run % 3 - 1,
        acceptance_rule=[("unknown", "greedy")[number % 2] for number in run // 2],
        temperature=rng.choice([np.nan, 0.0, 5e-324, 1e308], n),
        output_tokens=rng.choice([-1, 0, 1, 2**62], n),
        started_at=batch.ended_at - rng.choice([np.nan, 0.0, 10.0, -1e9], n),
    )


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(data=st.data(), runs=st.lists(ALIKE, min_size=1, max_size=15))
def test_any_records_fold_without_error_or_nan(
    data: st.DataObject, runs: list[tuple[str, int, int, float, int, int]]
) -> None:
    records = [run for run in runs for _ in range(run[-1])]
    batch = ObservationBatch.of(
        np.cumsum([run[4] for run in records]),
        [run[0] for run in records],
        [max(run[1:3]) for run in records],
        [min(run[1:3]) for run in records],
        [run[3] for run in records],
    )
    batch = with_odd_columns(batch)
    cuts = sorted(set(data.draw(st.lists(st.integers(0, len(batch)), max_size=5))))
    with np.errstate(all="raise", under="ignore"):
        whole = in_parts(QUICK, batch, [], restart=False)
        assert in_parts(QUICK, batch, cuts, restart=True) == whole
        told = repr((whole[1], describe(QUICK, decode_state(whole[0]))))
    assert re.search(r"\b(nan|inf)\b", told) is None


def test_requests_of_one_moment_tell_no_traffic() -> None:
    """However close two times are: their difference may be too small a number to divide by."""
    batch = requests(np.random.default_rng(11), np.full(600, 0.7))
    ended = np.where(np.arange(600) % 2 == 1, 0.0, -1e-309)
    state, _ = fold(DetectorConfig(), StreamState(), replace(batch, ended_at=ended))
    assert state.ready.any()
    assert state.requests_per_day == 0.0


def test_the_dependence_is_measured_after_an_eighth_more_requests_from_the_baseline_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the same totals as if it had been from the first request on, when nothing was known to measure."""
    measured_at: list[int] = []

    def counted(config: DetectorConfig, state: StreamState) -> StreamState:
        measured_at.append(int(state.drafted_requests.sum()))
        return measured(config, state)

    monkeypatch.setattr(import_module("driftguard.detection.fold"), "measured", counted)
    batch = requests(np.random.default_rng(12), np.full(1_000, 0.7))
    _, findings = fold(DetectorConfig(), StreamState(), batch)
    (ready,) = (finding.ordinal for finding in findings if isinstance(finding, BaselineReady))
    due = [1]
    while due[-1] + max(due[-1] // 8, 1) <= 1_000:
        due.append(due[-1] + max(due[-1] // 8, 1))
    assert measured_at == [total for total in due if total >= ready]


def test_settings_that_come_after_an_incident_in_the_same_batch() -> None:
    batch = requests(np.random.default_rng(13), np.repeat([0.7, 0.4], [2_500, 300]))
    batch = replace(batch, num_speculative_tokens=np.where(np.arange(2_800) < 2_700, 4, 6))
    whole = in_parts(DetectorConfig(), batch, [], restart=False)
    assert any(isinstance(finding, DriftOpened) for finding in whole[1])
    assert in_parts(DetectorConfig(), batch, [2_700], restart=True) == whole


def test_segments_that_begin_anew_in_another_order_than_they_came_in() -> None:
    rng, names = np.random.default_rng(14), ["a", "b"] * 1_700
    batch = requests(rng, np.repeat([0.7, 0.4], [3_000, 400]), names)
    batch = replace(batch, output_tokens=batch.drafted)
    state, _ = fold(DetectorConfig(), StreamState(), batch)
    fallen = state.incidents[0]
    assert fallen is not None
    assert len(fallen.segments) == 2
    state = accept_new_normal(state, "down")
    more = requests(rng, np.full(20, 0.4), ["b"] * 10 + ["a"] * 10, first_ordinal=3_401)
    more = replace(more, output_tokens=more.drafted)
    whole, _ = fold(DetectorConfig(), state, more)
    half, _ = fold(DetectorConfig(), state, more[:10])
    assert encode_state(fold(DetectorConfig(), half, more[10:])[0]) == encode_state(whole)


def test_folding_leaves_the_old_state_as_it_was() -> None:
    batch = eventful()
    state, _ = fold(DetectorConfig(), StreamState(), batch[:3_000])
    before = encode_state(state)
    fold(DetectorConfig(), state, batch[3_000:])
    assert encode_state(state) == before


def test_a_record_is_never_folded_twice() -> None:
    batch = eventful(100)
    state, _ = fold(DetectorConfig(), StreamState(), batch)
    with pytest.raises(ValueError, match="does not follow 100"):
        fold(DetectorConfig(), state, batch[50:])


@pytest.mark.parametrize(
    ("column", "value", "told"),
    [
        ("ordinal", 1, "increase"),
        ("accepted", 1_000, "accepted"),
        ("accepted", -1, "accepted"),
        ("ended_at", float("nan"), "ended_at"),
    ],
)
def test_impossible_columns_are_refused_by_name(column: str, value: float, told: str) -> None:
    batch = eventful(10)
    columns = {name: getattr(batch, name).copy() for name in ("ordinal", "drafted", "accepted", "ended_at")}
    columns[column][5] = value
    with pytest.raises(ValueError, match=told):
        ObservationBatch(segment=batch.segment, **columns)


def test_beyond_64_segments_new_ones_share_other() -> None:
    n = 200
    batch = requests(np.random.default_rng(1), np.full(n, 0.7), [f"s{number}" for number in range(n)])
    state, _ = fold(DetectorConfig(), StreamState(), batch)
    segments = {segment.segment: segment.requests for segment in describe(DetectorConfig(), state).segments}
    assert len(segments) == 65
    assert segments["other"] == n - 64
    assert in_parts(DetectorConfig(), batch, list(range(1, n)), restart=True)[0] == encode_state(state)
