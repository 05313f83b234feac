"""Simulated requests: the true acceptance of each is beta-distributed around its segment's mean."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from driftguard.detection import (
    BaselineReady,
    DetectorConfig,
    DriftOpened,
    Finding,
    ObservationBatch,
    StreamState,
    fold,
)

Floats = NDArray[np.float64]

BETWEEN_REQUESTS = 0.12  # standard deviation of the true acceptance of requests of one segment
START = 1_700_000_000.0


def requests(
    rng: np.random.Generator,
    means: NDArray[np.float64],
    segments: Sequence[str] | None = None,
    *,
    first_ordinal: int = 1,
    seconds_apart: float = 1.0,
) -> ObservationBatch:
    """One request per mean, 20 to 199 drafted tokens each."""
    n = len(means)
    precision = means * (1.0 - means) / BETWEEN_REQUESTS**2 - 1.0
    acceptance = rng.beta(means * precision, (1.0 - means) * precision)
    drafted = rng.integers(20, 200, n)
    ordinals = np.arange(first_ordinal, first_ordinal + n)
    return ObservationBatch.of(
        ordinals,
        segments if segments is not None else ["chat"] * n,
        drafted,
        rng.binomial(drafted, acceptance),
        [START + ordinal * seconds_apart for ordinal in ordinals.tolist()],
    )


def normal(
    rng: np.random.Generator, means: NDArray[np.float64], deviation: float, *, first_ordinal: int = 1
) -> ObservationBatch:
    """One request per mean, 1,000 drafted tokens each, accepted normally around it."""
    n = len(means)
    x = np.clip(means + rng.normal(0.0, deviation, n), 0.0, 1.0)
    ordinals = np.arange(first_ordinal, first_ordinal + n)
    return ObservationBatch.of(
        ordinals,
        ["chat"] * n,
        np.full(n, 1_000),
        np.rint(1_000 * x).astype(np.int64),
        START + ordinals.astype(np.float64),
    )


def constant(x: float, n: int, *, segment: str = "chat", first_ordinal: int = 1) -> ObservationBatch:
    """n requests that accept exactly x of 100 drafted tokens."""
    ordinals = np.arange(first_ordinal, first_ordinal + n)
    return ObservationBatch.of(
        ordinals,
        [segment] * n,
        np.full(n, 100),
        np.full(n, round(100 * x)),
        [START + ordinal for ordinal in ordinals.tolist()],
    )


def wandering_mix(
    rng: np.random.Generator, n: int, names: Sequence[str]
) -> tuple[list[str], NDArray[np.int64]]:
    """Segments whose shares wander between almost none and almost all."""
    level = 3.0 * np.tanh(np.cumsum(rng.normal(0.0, 0.02, (n, len(names))), axis=0))
    share = np.exp(level) / np.exp(level).sum(axis=1, keepdims=True)
    code = (share.cumsum(axis=1)[:, :-1] < rng.random((n, 1))).sum(axis=1)
    return [names[index] for index in code], code


def fold_all(
    batch: ObservationBatch, config: DetectorConfig | None = None, state: StreamState | None = None
) -> tuple[StreamState, list[Finding]]:
    return fold(config or DetectorConfig(), state or StreamState(), batch)


def time_to_alarm(config: DetectorConfig, batch: ObservationBatch) -> int:
    """Requests from the first watched one to the first alarm, or to the end of the batch."""
    state, ready = StreamState(), None
    for place in range(0, len(batch), 500):
        state, findings = fold(config, state, batch[place : place + 500])
        for finding in findings:
            if isinstance(finding, BaselineReady) and ready is None:
                ready = finding.ordinal
            if isinstance(finding, DriftOpened) and ready is not None:
                return finding.ordinal - ready
    assert ready is not None
    return len(batch) - ready


def _sums_within(session: NDArray[np.int64], moves: Floats) -> Floats:
    """The sum of the moves of its session up to each request."""
    order = np.argsort(session, kind="stable")
    total, own = np.cumsum(moves[order]), session[order]
    begins = np.flatnonzero(np.diff(own, prepend=-1))
    before = np.repeat(total[begins] - moves[order][begins], np.diff(begins, append=len(own)))
    sums = np.empty(len(moves))
    sums[order] = total - before
    return sums


def growing_sessions(
    seed: int,
    n: int,
    *,
    falls: float,
    turns: int,
    open_at_once: int,
    between: float,
    within: float = 0.1,
    drop: tuple[int, float] = (0, 0.0),
    shape: Callable[[Floats], Floats] = lambda part: part,
    slopes_differ: float = 0.0,
    wander: float = 0.0,
    some_begun: bool = False,
) -> ObservationBatch:
    """Requests of named sessions of so many turns, over which acceptance falls by `falls`; from place drop[0]
    on all means are lower by drop[1]. Sessions differ by `between`, their requests by `within`.

    `shape`: which part of the fall is reached at which part of the session. `slopes_differ`: from session to
    session. `wander`: how far a session moves from one of its requests to the next. `some_begun`: the first
    ones begin at any turn, else all at their first."""
    rng = np.random.default_rng(seed)
    slot = rng.integers(0, open_at_once, n)
    place = np.zeros(n, dtype=np.int64)  # among the requests of its slot
    for number in range(open_at_once):
        own = np.flatnonzero(slot == number)
        place[own] = np.arange(len(own))
    if some_begun:
        place += rng.integers(0, turns, open_at_once)[slot]
    session = place // turns * open_at_once + slot
    sessions = n + open_at_once
    slope = falls + (rng.normal(0.0, slopes_differ, sessions)[session] if slopes_differ else 0.0)
    mean = 0.7 - slope * shape(place % turns / turns) + rng.normal(0.0, between, sessions)[session]
    if wander:
        mean += _sums_within(session, rng.normal(0.0, wander, n))
    mean[drop[0] :] -= drop[1]
    mean = np.clip(mean, 0.03, 0.97)
    precision = mean * (1.0 - mean) / within**2 - 1.0
    acceptance = rng.beta(mean * precision, (1.0 - mean) * precision)
    drafted, ordinals = rng.integers(20, 200, n), np.arange(1, n + 1)
    return ObservationBatch.of(
        ordinals,
        ["chat"] * n,
        drafted,
        rng.binomial(drafted, acceptance),
        START + ordinals.astype(np.float64),
        session=[f"s{number}" for number in session.tolist()],
    )
