"""Streams that come from counters: one observation per scrape, of thousands of drafted tokens."""

from __future__ import annotations

from collections.abc import Sequence
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
from driftguard.detection.statistics.windows import (
    LONGEST_START,
    LONGEST_TOLD,
    WINDOW_REFERENCE,
    learn,
    odd_start,
    relative_variance,
)
from tests.benchmarks.detection.dependent import DEPENDENT, FEW_REQUESTS, Dependent
from tests.benchmarks.detection.traffic import Change
from tests.detection.traffic import START

CONFIG = DetectorConfig()
SECONDS = 10.0


def windows(
    rng: np.random.Generator,
    means: Sequence[float] | NDArray[np.float64],
    drafted: int | NDArray[np.int64] = 20_000,
    *,
    first_ordinal: int = 1,
    between: float = 0.01,
    overdispersion: float = 4.0,
) -> ObservationBatch:
    """x has the variance between^2 + overdispersion x binomial."""
    mean, n = np.asarray(means), len(means)
    tokens = np.broadcast_to(np.asarray(drafted, dtype=np.int64), (n,)).copy()
    spread = np.sqrt(between**2 + overdispersion * mean * (1.0 - mean) / tokens)
    x = np.clip(mean + spread * rng.normal(size=n), 0.0, 1.0)
    ordinal = np.arange(first_ordinal, first_ordinal + n)
    ended = START + SECONDS * ordinal.astype(np.float64)
    return ObservationBatch.of(
        ordinal,
        ["default"] * n,
        tokens,
        np.rint(tokens * x).astype(np.int64),
        ended,
        kind=["window"] * n,
        started_at=ended - SECONDS,
    )


def opened(findings: list[Finding]) -> list[DriftOpened]:
    return [finding for finding in findings if isinstance(finding, DriftOpened)]


def run(batch: ObservationBatch, config: DetectorConfig = CONFIG) -> tuple[StreamState, list[Finding]]:
    return fold(config, StreamState(), batch)


@pytest.mark.parametrize(("step", "most"), [(-0.2, 7), (0.15, 9)])
def test_a_change_of_the_workload_is_found_within_a_few_windows(step: float, most: int) -> None:
    """Of 16 and 12 standard deviations of a window, as between the workloads of real traces."""
    held = 0
    for seed in range(30):
        batch = windows(np.random.default_rng([51, seed]), [0.6] * 100 + [0.6 + step] * 10)
        state, findings = run(batch)
        (found,) = opened(findings)
        assert found.direction == ("down" if step < 0 else "up")
        assert 100 < found.ordinal <= 100 + most
        held += found.interval[0] <= 101 <= found.interval[1]
        assert found.change_point == 101
        assert found.before.rate == pytest.approx(0.6, abs=0.03)
        assert found.after.rate == pytest.approx(0.6 + step, abs=0.03)
        assert found.after.high - found.after.low < 0.1
        assert describe(CONFIG, state).verdict in ("degraded", "improved")
    assert held >= 25


@pytest.mark.slow
def test_false_alarms_are_at_least_A_apart_although_twelve_windows_make_the_baseline() -> None:
    config, times = DetectorConfig(false_alarm_every=1_000.0), []
    for seed in range(60):
        rng = np.random.default_rng([52, seed])
        tokens = rng.choice([3_000, 20_000, 40_000], 4_000)
        found = opened(run(windows(rng, [0.5] * 4_000, tokens), config)[1])
        times.append(found[0].ordinal if found else 4_000)
    assert np.mean(times) >= 1_000.0


def test_a_reference_period_is_ten_lifetimes_of_a_request_where_they_are_told() -> None:
    """Stream 13 hardly shows at first that its windows share requests: with a baseline of twelve of them it
    raised two false alarms, after 33 and 213."""
    told = Dependent("60 s", "window", DEPENDENT[1].draw, lifetime=60.0)
    for seed in range(15):
        state, findings = run(told.batch([777, 1, seed], 20_000)[:400])
        ready = next(finding for finding in findings if isinstance(finding, BaselineReady))
        lifetime = state.running_requests / state.started_requests
        assert lifetime == pytest.approx(1.0 / (1.0 - np.exp(-1.0 / 6.0)), rel=0.1)
        assert ready.requests >= 8.0 * lifetime  # as it was estimated at the time
        assert opened(findings) == []


@pytest.mark.parametrize(
    ("drafted", "windows_needed"),
    [
        (20_000, WINDOW_REFERENCE),  # a busy server
        (2_000, 50),  # 100,000 draft tokens, as of 430 requests
        (50, 360),  # an hour
    ],
)
def test_a_baseline_is_of_an_hour_or_of_as_many_tokens_as_of_requests(
    drafted: int, windows_needed: int
) -> None:
    _, findings = run(windows(np.random.default_rng(60), [0.5] * 500, drafted, overdispersion=1.0))
    ready = next(finding for finding in findings if isinstance(finding, BaselineReady))
    assert ready.requests == windows_needed


def test_an_hour_is_of_windows_whatever_the_clock_says() -> None:
    """A sidecar that is away for a night after three windows, and a clock that goes a day forward or back."""
    for lost in (43_200.0, 86_400.0, -86_400.0):
        batch = windows(np.random.default_rng(63), [0.5] * 500, 50, overdispersion=1.0)
        later = np.where(np.arange(500) < 3, 0.0, lost)
        batch = replace(batch, ended_at=batch.ended_at + later, started_at=batch.started_at + later)
        _, findings = run(batch)
        ready = next(finding for finding in findings if isinstance(finding, BaselineReady))
        assert ready.requests == pytest.approx(360, abs=1)  # the window after the gap may be left out


def test_how_many_windows_are_missing_is_told_from_the_second_on() -> None:
    batch = windows(np.random.default_rng(64), [0.5] * 100, 50, overdispersion=1.0)
    missing = [describe(CONFIG, run(batch[:n])[0]).segments[0].requests_needed for n in (2, 3, 12, 100)]
    assert missing == [358, 357, 348, 260]


@pytest.mark.parametrize(("odd", "drafted"), [(12, 300), (60, 300), (3, 20_000)])
def test_an_odd_beginning_is_not_in_the_baseline(odd: int, drafted: int) -> None:
    """One minute of sampled traffic, ten minutes, or the first windows of a busy server."""
    n = 600 + odd
    batch = windows(np.random.default_rng([61, odd]), [0.04] * odd + [0.57] * 600 + [0.3] * 40, drafted)
    state, findings = run(batch)
    (found,) = opened(findings)
    assert n < found.ordinal <= n + 10
    assert found.change_point == pytest.approx(n + 1, abs=2)
    assert found.direction == "down"
    assert found.before.rate == pytest.approx(0.57, abs=0.01)
    same = StreamState()
    for place in range(0, len(batch), 7):
        same, _ = fold(CONFIG, same, batch[place : place + 7])
    assert encode_state(same) == encode_state(state)


def test_what_comes_back_is_usual() -> None:
    """A beginning like what follows it later, a slow rise, and a beginning that is more than a quarter."""
    random = np.random.default_rng(62)
    x = random.normal(0.0, 0.02, 400)
    assert odd_start(x + np.where(np.arange(400) < 30, 0.3, 0.6), 0.1) == 30
    assert odd_start(x + np.where(np.arange(400) % 200 < 30, 0.3, 0.6), 0.1) == 0
    assert odd_start(x + np.linspace(0.3, 0.6, 400), 0.1) == 0
    assert odd_start(x + np.where(np.arange(400) < 150, 0.3, 0.6), 0.1) == 0
    assert odd_start(x + np.where(np.arange(400) < 30, 0.52, 0.6), 0.1) == 0
    assert odd_start(x + np.where(np.arange(400) < 30, 0.9, 0.6), 0.1) == 0  # never a fall


@pytest.mark.parametrize(("started", "most"), [([0], LONGEST_START), ([0] * 99 + [1], LONGEST_TOLD)])
def test_a_server_with_endless_requests_is_watched_some_day(started: list[int], most: int) -> None:
    """Or with a counter of started requests that stands still."""
    batch = windows(np.random.default_rng(59), [0.6] * 1_600 + [0.4] * 20)
    told = replace(batch, concurrency=np.full(1_620, 8), started_requests=np.resize(started, 1_620))
    _, findings = run(told)
    ready, found = (item for item in findings if isinstance(item, BaselineReady | DriftOpened))
    assert isinstance(ready, BaselineReady)
    assert ready.ordinal == most
    assert found.ordinal > 1_600


def test_a_fall_is_found_although_windows_seemed_dependent() -> None:
    """An f of 4 to 7 was false here from the beginning: the fall took longer to its alarm than the patience
    lasted, and was counted as dependence, for good."""
    family, drop = FEW_REQUESTS[1]
    batch = family.batch([20_261_124, 99, 16], 7_260, Change(1_500, drop))
    (found,) = opened(run(batch)[1])
    assert 1_500 < found.ordinal < 1_800
    assert found.direction == "down"


def test_the_spread_follows_the_traffic() -> None:
    """A window of little traffic is worth less: what is no news at 500 tokens is an alarm at 40,000."""
    rng = np.random.default_rng(53)
    tokens = np.where(np.arange(400) % 2 == 0, 1_000, 40_000)
    batch = windows(rng, [0.5] * 400, tokens, between=0.005)
    learned = learn(batch.accepted / batch.drafted, batch.drafted.astype(np.float64))
    small, large = relative_variance(np.tile(learned, (2, 1)), np.array([1_000.0, 40_000.0]))
    assert small / large > 10.0
    state, _ = run(batch)
    for drafted, alarms in ((500, 0), (40_000, 1)):
        late = windows(rng, [0.44] * 12, drafted, first_ordinal=401, between=0.005, overdispersion=0.0)
        assert len(opened(fold(CONFIG, state, late)[1])) == alarms


def test_traffic_that_grows_tenfold_alone_is_no_incident() -> None:
    for seed in range(20):
        tokens = np.repeat([3_000, 35_000, 40_000, 15_000], 25)
        batch = windows(np.random.default_rng([54, seed]), [0.4] * 100, tokens)
        assert opened(run(batch)[1]) == []


def test_recovery_ends_the_incident_within_a_few_windows() -> None:
    for seed in range(10):
        batch = windows(np.random.default_rng([55, seed]), [0.6] * 60 + [0.4] * 30 + [0.6] * 20)
        ended = [finding for finding in run(batch)[1] if isinstance(finding, DriftClosed)]
        assert [end.reason for end in ended] == ["recovered"]
        assert 90 < ended[0].ordinal <= 102


def test_an_incident_stays_open_while_acceptance_stays_low() -> None:
    for seed in range(10):
        batch = windows(np.random.default_rng([56, seed]), [0.6] * 20 + [0.5] * 500)
        assert not [finding for finding in run(batch)[1] if isinstance(finding, DriftClosed)]


def test_after_an_accepted_new_normal_the_next_change_is_found() -> None:
    rng = np.random.default_rng(57)
    batch = windows(rng, [0.375] * 23 + [0.6] * 23 + [0.4] * 10)
    state, findings = run(batch[:30])
    assert [found.direction for found in opened(findings)] == ["up"]
    state = accept_new_normal(state, "up")
    assert describe(CONFIG, state).verdict == "insufficient_data"
    state, findings = fold(CONFIG, state, batch[30:])
    ready, found = findings
    assert isinstance(ready, BaselineReady)
    assert ready.why.text == "an operator accepted a new normal"
    assert ready.ordinal <= 24 + WINDOW_REFERENCE
    assert ready.mean_per_request == pytest.approx(0.6, abs=0.02)
    assert isinstance(found, DriftOpened)
    assert found.direction == "down"
    assert 46 < found.ordinal <= 52


def test_a_fall_is_found_though_a_short_odd_phase_made_the_first_baseline() -> None:
    """A minute of temperature 1 came first: the fall from .57 to .14 was "steady", the end of a rise."""
    for seed in range(10):
        batch = windows(np.random.default_rng([63, seed]), [0.04] * 14 + [0.57] * 90 + [0.14] * 10)
        rise, end, fall = (each for each in run(batch)[1] if isinstance(each, DriftOpened | DriftClosed))
        assert isinstance(end, DriftClosed)
        assert (rise.direction, end.reason) == ("up", "became_normal")
        assert isinstance(fall, DriftOpened)
        assert fall.direction == "down"
        assert 104 < fall.ordinal <= 111
        assert fall.before.rate == pytest.approx(0.57, abs=0.03)


def test_a_rise_above_a_baseline_of_hours_is_not_the_norm_within_an_hour() -> None:
    batch = windows(np.random.default_rng(64), [0.5] * 1_000 + [0.7] * 360 + [0.5] * 20)
    ended = [finding for finding in run(batch)[1] if isinstance(finding, DriftClosed)]
    assert [end.reason for end in ended] == ["recovered"]


def test_where_the_history_holds_more_than_the_baseline_needs_one_more_window_is_needed() -> None:
    state, _ = run(windows(np.random.default_rng(62), [0.375] * 23 + [0.6] * 40))
    (segment,) = describe(CONFIG, accept_new_normal(state, "up")).segments
    assert segment.learning is not None
    assert segment.requests_needed == 1


def test_without_an_incident_there_is_nothing_to_accept() -> None:
    state, _ = run(windows(np.random.default_rng(58), [0.5] * 30))
    assert encode_state(accept_new_normal(state, "down")) == encode_state(state)


def test_idle_windows_are_ignored_and_do_not_mean_that_drafting_stopped() -> None:
    batch = windows(np.random.default_rng(59), [0.5] * 200)
    batch.drafted[30:] = 0
    batch.accepted[30:] = 0
    before, _ = run(batch[:30])
    after, findings = fold(CONFIG, before, batch[30:])
    assert findings == []
    assert after.stream_evidence.tolist() == before.stream_evidence.tolist()
    assert describe(CONFIG, after).verdict == "steady"


def test_a_window_after_a_gap_is_counted_and_is_no_evidence() -> None:
    """The counter restarted: its first window after that holds what nobody knows."""
    batch = windows(np.random.default_rng(60), [0.5] * 60)
    later = np.where(np.arange(60) >= 30, 300.0, 0.0)
    odd = batch.accepted.copy()
    odd[30] = 0
    batch = replace(batch, ended_at=batch.ended_at + later, started_at=batch.started_at + later, accepted=odd)
    whole, findings = run(batch)
    summary = describe(CONFIG, whole)
    assert opened(findings) == []
    assert (summary.requests, summary.windows_after_gap) == (60, 1)
    assert summary.acceptance is not None
    assert summary.acceptance.requests == 59
    state = StreamState()
    for place in range(60):
        state, _ = fold(CONFIG, decode_state(encode_state(state)), batch[place : place + 1])
    assert encode_state(state) == encode_state(whole)


def test_state_does_not_depend_on_batches_through_changes_and_accepted_normals() -> None:
    rng = np.random.default_rng(61)
    tokens = rng.integers(300, 40_000, 120)
    batch = windows(rng, [0.4] * 30 + [0.6] * 30 + [0.3] * 30 + [0.4] * 30, tokens)

    def folded(cuts: list[int]) -> bytes:
        state = StreamState()
        for start, stop in zip([0, *cuts], [*cuts, 120], strict=True):
            state, _ = fold(CONFIG, decode_state(encode_state(state)), batch[start:stop])
            if stop == 45:
                state = accept_new_normal(state, "up")
        return encode_state(state)

    assert folded([45]) == folded(sorted({45, *rng.choice(119, 40, replace=False).tolist()} - {0}))


def test_windows_of_next_to_no_traffic_after_a_busy_baseline_say_nothing() -> None:
    drafted = np.array([2**40] * WINDOW_REFERENCE + [1] * 400)
    means = [0.1, 0.9] * (WINDOW_REFERENCE // 2) + [0.0] * 400
    batch = windows(np.random.default_rng(3), means, drafted)
    with np.errstate(all="raise", under="ignore"):
        state, findings = fold(CONFIG, StreamState(), batch)
    assert opened(findings) == []
    assert describe(CONFIG, state).verdict == "steady"
