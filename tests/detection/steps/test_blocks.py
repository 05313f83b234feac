"""Neighbouring requests that are alike, where nothing says which of them belong together."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

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
from driftguard.detection.state.columns import columns_of, history_rows
from driftguard.detection.state.stream_state import with_strata
from driftguard.detection.statistics import autocorrelation
from driftguard.detection.statistics.autocorrelation import PAIRED, SCALES, add_neighbours
from driftguard.detection.statistics.baseline import baselines
from driftguard.detection.statistics.sessions import KNOWN
from driftguard.detection.steps.evidence import in_blocks, in_past_blocks
from driftguard.detection.steps.expectation import predicted
from tests.detection.traffic import fold_all, normal, requests, time_to_alarm

pytestmark = pytest.mark.slow

DEVIATION = np.sqrt(0.0144 / 2.0)  # between conversations, and between the requests of one
CONFIG = DetectorConfig(false_alarm_every=2_000.0)


def conversations(rng: np.random.Generator, mean: NDArray[np.float64]) -> ObservationBatch:
    """8 to 12 requests each, one conversation after the other; nothing names them."""
    lengths = rng.integers(8, 13, len(mean) // 8 + 1)
    session = np.repeat(np.arange(len(lengths)), lengths)[: len(mean)]
    own = rng.normal(0.0, DEVIATION, len(lengths))[session]
    return normal(rng, mean + own, DEVIATION)


def opened(findings: list[Finding]) -> list[DriftOpened]:
    return [finding for finding in findings if isinstance(finding, DriftOpened)]


def ready(findings: list[Finding]) -> BaselineReady:
    return next(finding for finding in findings if isinstance(finding, BaselineReady))


def mean_time_to_alarm(streams: int, requests_each: int) -> float:
    times = []
    for seed in range(streams):
        batch = conversations(np.random.default_rng([71, seed]), np.full(requests_each, 0.6))
        times.append(time_to_alarm(CONFIG, batch))
    return float(np.mean(times))


def test_false_alarms_are_at_least_A_apart_in_blocks() -> None:
    assert mean_time_to_alarm(20, 12_000) >= 2_000.0


def test_a_session_that_few_requests_name_leaves_the_others_in_blocks() -> None:
    for seed in range(8):
        batch = conversations(np.random.default_rng([73, seed]), np.full(6_000, 0.6))
        few = ["health check" if number % 20 == 0 else None for number in range(len(batch))]
        assert ready(fold_all(replace(batch, session=few), CONFIG)[1]).block_length >= 8


def test_request_by_request_the_same_traffic_raises_false_alarms_much_sooner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(autocorrelation, "DEMAND_LEVEL", 0.0)  # nothing ever demands blocks
    assert mean_time_to_alarm(6, 3_000) < 500.0


def test_independent_requests_are_watched_one_by_one() -> None:
    for seed in range(60):
        batch = requests(np.random.default_rng([72, seed]), np.full(900, 0.7))
        assert ready(fold_all(batch)[1]).block_length == 1


@pytest.mark.parametrize(("drop", "most"), [(0.1, 600), (0.2, 320)])
def test_a_drop_is_found_and_its_moment_lies_in_the_interval(drop: float, most: int) -> None:
    delays, held = [], 0
    for seed in range(12):
        mean = np.repeat([0.6, 0.6 - drop], [6_000, 2_500])
        (found,) = opened(fold_all(conversations(np.random.default_rng([73, seed]), mean))[1])
        assert found.direction == "down"
        assert found.ordinal > 6_000
        delays.append(found.ordinal - 6_000)
        held += found.interval[0] <= 6_001 <= found.interval[1]
    assert np.median(delays) <= most
    assert held >= 10


def test_recovery_ends_the_incident() -> None:
    mean = np.repeat([0.6, 0.35, 0.6], [5_000, 1_500, 1_500])
    batch = conversations(np.random.default_rng(74), mean)
    closed = [found for found in fold_all(batch)[1] if isinstance(found, DriftClosed)]
    assert [end.reason for end in closed] == ["recovered"]
    assert 6_500 < closed[0].ordinal < 7_500


def test_the_verdict_says_that_no_session_is_given_and_blocks_are_used() -> None:
    batch = conversations(np.random.default_rng(75), np.full(6_000, 0.6))
    state, findings = fold_all(batch)
    summary = describe(DetectorConfig(), state)
    assert ready(findings).block_length >= 8
    assert summary.sessions == "not given"
    assert summary.block_length == summary.segments[0].block_length == ready(findings).block_length
    named = replace(batch, session=[f"s{number // 10}" for number in range(6_000)])
    state, findings = fold_all(named)
    assert ready(findings).block_length == 1
    assert describe(DetectorConfig(), state).sessions == "given"


def test_answer_lengths_that_come_in_runs_demand_no_blocks() -> None:
    """What the line explains is no likeness."""
    rng = np.random.default_rng(76)
    place = np.repeat(rng.normal(0.0, 1.0, 600), 10)
    batch = requests(rng, np.clip(0.6 - 0.09 * place, 0.05, 0.95))
    blocked = ready(fold_all(batch)[1])
    assert blocked.block_length > 1
    lengths = (np.exp(np.log(200.0) + place)).astype(np.int64)
    assert ready(fold_all(replace(batch, output_tokens=lengths))[1]).block_length == 1


def test_a_slow_movement_demands_no_blocks() -> None:
    """Half a day of a daily rhythm: no block of an hour or less could mend that."""
    for seed in range(10):
        hour = np.arange(1_500) * 86.4 / 3600.0
        mean = 0.6 + 0.08 * np.sin(2.0 * np.pi * hour / 24.0)
        batch = requests(np.random.default_rng([77, seed]), mean, seconds_apart=86.4)
        assert ready(fold_all(batch)[1]).block_length == 1


def test_an_accepted_new_normal_measures_the_likeness_anew() -> None:
    rng = np.random.default_rng(78)
    state, findings = fold_all(conversations(rng, np.repeat([0.6, 0.4], [5_000, 1_000])))
    assert state.block_length[0] > 1
    state = accept_new_normal(state, "down")
    assert state.block_length[0] == 1
    state, findings = fold(DetectorConfig(), state, requests(rng, np.full(9_000, 0.5), first_ordinal=6_001))
    assert ready(findings).reason == "an operator accepted a new normal"


def test_variances_between_neighbouring_blocks_are_those_of_the_definition() -> None:
    rng = np.random.default_rng(79)
    x, line = rng.normal(0.0, 1.0, (2, 1_237))
    whole = add_neighbours(np.zeros((SCALES, PAIRED)), 0, x, line)
    for scale in range(SCALES):
        size = 2**scale
        pairs = len(x) // (2 * size)
        sums = (x - 0.3 * line)[: pairs * 2 * size].reshape(pairs, 2, size).sum(axis=2)
        squares = whole[scale, 0] - 0.6 * whole[scale, 1] + 0.09 * whole[scale, 2]
        assert squares == pytest.approx(((sums[:, 0] - sums[:, 1]) ** 2).sum())
    parts, cuts = np.zeros((SCALES, PAIRED)), sorted(rng.choice(1_237, 90, replace=False).tolist())
    for start, stop in zip([0, *cuts], [*cuts, len(x)], strict=True):
        parts = add_neighbours(parts, start, x[start:stop], line[start:stop])
    assert parts.tobytes() == whole.tobytes()


def in_two_segments(seed: int) -> ObservationBatch:
    """Conversations in one segment, independent requests of known length in the other; one falls."""
    rng = np.random.default_rng(seed)
    alike = conversations(rng, np.repeat([0.6, 0.4, 0.6], [3_000, 800, 700]))
    place = rng.permutation(9_000)[:4_500]
    other = requests(rng, np.full(9_000, 0.7))
    x, drafted = other.accepted.copy(), other.drafted.copy()
    names = ["other"] * 9_000
    lengths = np.full(9_000, 300)
    place.sort()
    x[place], drafted[place], lengths[place] = alike.accepted, alike.drafted, -1
    for index in place.tolist():
        names[index] = "chat"
    return replace(other, accepted=x, drafted=drafted, segment=names, output_tokens=lengths)


def test_the_result_does_not_depend_on_batches_or_restarts() -> None:
    batch = in_two_segments(80)
    whole, found = fold_all(batch, CONFIG)
    assert whole.block_length.tolist().count(1) == 1
    assert opened(found)
    rng, state, findings = np.random.default_rng(81), StreamState(), []
    cuts = sorted({*rng.choice(9_000, 120, replace=False).tolist(), *range(6_000, 6_200)})
    for start, stop in zip([0, *cuts], [*cuts, 9_000], strict=True):
        state, more = fold(CONFIG, decode_state(encode_state(state)), batch[start:stop])
        findings += more
    assert findings == found
    assert encode_state(state) == encode_state(whole)


def test_the_history_tells_the_blocks_as_they_were_bet_on() -> None:
    batch, config = in_two_segments(82)[:5_500], DetectorConfig(history=1_000)
    state, _ = fold_all(batch[:5_000], config)
    later, strata = with_strata(state, batch[5_000:], np.ones(500, dtype=np.bool_))
    rows = columns_of(later, batch[5_000:], np.ones(500, dtype=np.bool_), strata)
    base = baselines(state.reference, state.blocks)
    bet_on, _ = in_blocks(state, predicted(state, base, config.ignore, rows, np.zeros((500, KNOWN))))
    after, _ = fold(config, state, batch[5_000:])
    past = in_past_blocks(after, history_rows(after))[-500:]
    assert past.fresh.tolist() == bet_on.fresh.tolist()
    assert 0 < past.fresh.sum() < 500
    for column in ("x", "expected", "margin"):
        assert getattr(past, column) == pytest.approx(getattr(bet_on, column), rel=1e-3)
