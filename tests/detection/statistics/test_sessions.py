"""Requests of one conversation are alike: what that does to the guarantee, and what is done about it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from numpy.typing import NDArray

from driftguard.detection import (
    BaselineReady,
    DetectorConfig,
    DriftOpened,
    Finding,
    ObservationBatch,
    StreamState,
    describe,
    fold,
)
from driftguard.detection.state.codec import decode_state, encode_state
from driftguard.detection.statistics.sessions import OPEN_SESSIONS
from tests.detection.traffic import START, fold_all, requests, time_to_alarm

pytestmark = pytest.mark.slow

BETWEEN, WITHIN = 0.10, 0.08  # standard deviations of sessions' means, and of requests of one session
LENGTH = 15  # requests of a session
CONFIG = DetectorConfig(false_alarm_every=2_000.0, minimum_drop=0.1)


def conversations(
    rng: np.random.Generator, n: int, *, interleaved: bool, drop_at: int | None = None, drop: float = 0.0
) -> ObservationBatch:
    """Sessions of LENGTH requests one after the other, or 20 at a time in random order."""
    session = np.arange(n) // LENGTH
    if interleaved:
        group = 20 * LENGTH
        order = np.concatenate(
            [start + rng.permutation(min(group, n - start)) for start in range(0, n, group)]
        )
        session = session[order]
    mean = 0.6 + rng.normal(0.0, BETWEEN, session.max() + 1)[session]
    x = np.clip(mean + rng.normal(0.0, WITHIN, n), 0.0, 1.0)
    if drop_at is not None:
        x[drop_at:] = np.clip(x[drop_at:] - drop, 0.0, 1.0)
    ordinal = np.arange(1, n + 1)
    return ObservationBatch.of(
        ordinal,
        ["chat"] * n,
        np.full(n, 1_000),
        np.rint(1_000 * x).astype(np.int64),
        START + ordinal.astype(np.float64),
        session=[f"conversation {number}" for number in session.tolist()],
    )


def opened(findings: list[Finding]) -> list[DriftOpened]:
    return [finding for finding in findings if isinstance(finding, DriftOpened)]


def mean_time_to_alarm(*, interleaved: bool, streams: int) -> float:
    times = []
    for seed in range(streams):
        batch = conversations(np.random.default_rng([41, seed]), 9_000, interleaved=interleaved)
        times.append(time_to_alarm(CONFIG, batch))
    return float(np.mean(times))


@pytest.mark.parametrize("interleaved", [False, True])
def test_false_alarms_are_at_least_A_apart_where_sessions_are_given(interleaved: bool) -> None:
    assert mean_time_to_alarm(interleaved=interleaved, streams=25) >= 2_000.0


@pytest.mark.parametrize("interleaved", [False, True])
def test_a_drop_of_every_session_is_found(interleaved: bool) -> None:
    delays = []
    for seed in range(6):
        batch = conversations(
            np.random.default_rng([42, seed]), 6_000, interleaved=interleaved, drop_at=4_000, drop=0.2
        )
        found = opened(fold_all(batch, DetectorConfig(minimum_drop=0.1))[1])
        assert {finding.direction for finding in found} == {"down"}
        assert found[0].ordinal > 4_000
        delays.append(found[0].ordinal - 4_000)
    assert np.median(delays) <= 6 * LENGTH


def test_the_reference_period_counts_sessions_rather_than_requests() -> None:
    rng = np.random.default_rng(43)
    batch = conversations(rng, 9_000, interleaved=False)
    shuffled = replace(batch, session=[None] * 9_000, accepted=rng.permutation(batch.accepted))
    sizes = [
        next(finding.requests for finding in fold_all(given, CONFIG)[1] if isinstance(finding, BaselineReady))
        for given in (batch, shuffled)
    ]
    deviation = BETWEEN**2 + WITHIN**2
    clustered = WITHIN**2 + BETWEEN**2 * LENGTH
    assert sizes[0] == pytest.approx(sizes[1] * clustered / deviation, rel=0.5)


def test_the_summary_says_whether_sessions_are_given() -> None:
    batch = conversations(np.random.default_rng(44), 300, interleaved=False)
    half = [name if place % 2 else None for place, name in enumerate(batch.session)]
    for session, told in ((batch.session, "given"), (half, "in part"), ([None] * 300, "not given")):
        state, _ = fold_all(replace(batch, session=session))
        assert describe(CONFIG, state).sessions == told


def test_open_sessions_are_bounded_and_the_state_does_not_depend_on_batches_or_restarts() -> None:
    rng, n = np.random.default_rng(45), 4_000
    names = [f"s{number}" for number in rng.integers(0, 900, n)]
    segments = [f"segment {number}" for number in rng.integers(0, 3, n)]
    length = np.exp(rng.normal(5.0, 1.0, n)).astype(np.int64)
    means: NDArray[np.float64] = np.where(np.arange(n) < 2_500, 0.7, 0.4)
    batch = replace(requests(rng, means, segments), session=names, output_tokens=length)
    whole, found = fold_all(batch, CONFIG)
    assert len(whole.sessions) == OPEN_SESSIONS
    assert opened(found)
    state, cuts = StreamState(), sorted(rng.choice(n, 80, replace=False).tolist())
    for start, stop in zip([0, *cuts], [*cuts, n], strict=True):
        state, _ = fold(CONFIG, decode_state(encode_state(state)), batch[start:stop])
    assert encode_state(state) == encode_state(whole)
