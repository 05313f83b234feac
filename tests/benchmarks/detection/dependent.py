"""Simulated traffic whose observations depend on each other: windows of counters, conversations and users
that nobody names.

A request has a true acceptance, drawn around the mean of its task, its conversation or its user; requests
are as in `traffic.py` (20 to 199 drafted tokens), windows as a scrape every ten seconds gives them. From the
change on all means are lower by `drop`. One seed gives the same traffic for every drop before the change.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from driftguard.detection import ObservationBatch
from tests.benchmarks.detection.traffic import Change
from tests.detection.traffic import BETWEEN_REQUESTS, START, wandering_mix

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Random = np.random.Generator
Draw = Callable[[Random, int, Floats], tuple[Floats, Ints]]

SCRAPE_SECONDS = 10.0
RUNNING = 20  # long requests at a time
TOKENS_A_WINDOW = 800  # drafted by one running request between two scrapes: 20 steps a second, K = 4
TASKS = np.array([0.75, 0.45, 0.65])  # mean acceptance of three tasks
TURNS = 5  # of a conversation
MEAN = 0.6


@dataclass(frozen=True, slots=True)
class Dependent:
    """`draw` gives (true mean acceptance, drafted tokens) of n observations whose mean falls by [n]."""

    name: str
    kind: Literal["request", "window"]
    draw: Draw
    lifetime: float | None = None  # seconds, of RUNNING requests: windows tell how many ran and started
    segments: int = 1  # named ones, each of which has such traffic of its own
    apart: float = 1.0  # seconds from one request to the next

    def batch(self, seed: list[int], n: int, change: Change | None = None) -> ObservationBatch:
        rng = np.random.default_rng(seed)
        fallen = change.size(n) if change else np.zeros(n)
        code = rng.integers(0, self.segments, n) if self.segments > 1 else np.zeros(n, dtype=np.int64)
        mean, drafted = np.empty(n), np.empty(n, dtype=np.int64)
        for own in (code == number for number in range(self.segments)):
            mean[own], drafted[own] = self.draw(rng, int(own.sum()), fallen[own])
        ordinals = np.arange(1, n + 1)
        seconds = SCRAPE_SECONDS if self.kind == "window" else self.apart
        ended = START + seconds * ordinals.astype(np.float64)
        batch = ObservationBatch.of(
            ordinals,
            ["default"] * n if self.segments == 1 else [f"segment {number}" for number in code],
            drafted,
            rng.binomial(drafted, np.clip(mean, 0.0, 1.0)),
            ended,
            kind=[self.kind] * n,
            started_at=ended - seconds,
        )
        if self.lifetime is None:
            return batch
        started = rng.binomial(RUNNING, 1.0 - math.exp(-seconds / self.lifetime), n)
        return replace(batch, concurrency=np.full(n, RUNNING), started_requests=started)


def beta(rng: Random, mean: Floats, deviation: float) -> Floats:
    mean = np.clip(mean, 0.03, 0.97)
    precision = mean * (1.0 - mean) / deviation**2 - 1.0
    return rng.beta(mean * precision, (1.0 - mean) * precision)


def _long_requests(lifetime: float) -> Draw:
    """Windows of RUNNING requests at a time, each open for `lifetime` seconds on average (exponential)."""

    def draw(rng: Random, n: int, fallen: Floats) -> tuple[Floats, Ints]:
        ends = rng.random((n, RUNNING)) < 1.0 - np.exp(-SCRAPE_SECONDS / lifetime)
        ends[0] = True
        begun = np.maximum.accumulate(
            np.where(ends, np.arange(n)[:, None], 0), axis=0
        )  # window of the request
        own = beta(rng, np.full((n, RUNNING), MEAN), BETWEEN_REQUESTS)
        mean = np.take_along_axis(own, begun, axis=0).mean(axis=1) - fallen
        return mean, np.full(n, TOKENS_A_WINDOW * RUNNING, dtype=np.int64)

    return draw


def _few_requests(requests: float) -> Draw:
    """Windows of a Poisson number of short requests (one at least)."""

    def draw(rng: Random, n: int, fallen: Floats) -> tuple[Floats, Ints]:
        count = np.maximum(rng.poisson(requests, n), 1)
        own = beta(rng, np.full(int(count.sum()), MEAN), BETWEEN_REQUESTS)
        mean = np.add.reduceat(own, np.cumsum(count) - count) / count
        return mean - fallen, (200 * count).astype(np.int64)

    return draw


def _mix(memory: float | None, requests: int) -> Draw:
    """Windows of `requests` requests of three tasks, whose shares wander: with this memory in windows
    (an autoregression), or between almost none and almost all."""

    def draw(rng: Random, n: int, fallen: Floats) -> tuple[Floats, Ints]:
        if memory is None:
            steps = wandering_mix(rng, n * requests, ["", "", ""])[1].reshape(n, requests)
            shares: Floats = np.stack([(steps == task).mean(axis=1) for task in range(len(TASKS))], axis=1)
        else:
            level = np.stack([wander(rng, n, memory) for _ in TASKS], axis=1)
            shares = np.exp(0.5 * level)
            shares /= shares.sum(axis=1, keepdims=True)
            shares = rng.multinomial(requests, shares).astype(np.float64) / requests
        noise = rng.normal(0.0, BETWEEN_REQUESTS / np.sqrt(requests), n)
        return shares @ TASKS + noise - fallen, np.full(n, 200 * requests, dtype=np.int64)

    return draw


def wander(rng: Random, n: int, memory: float) -> Floats:
    """A stationary Gaussian autoregression of variance 1 that forgets within `memory` steps."""
    keep = np.exp(-1.0 / memory)
    steps = rng.normal(0.0, np.sqrt(1.0 - keep**2), n)
    steps[0] /= np.sqrt(1.0 - keep**2)
    level, path = 0.0, np.empty(n)
    for place, step in enumerate(steps.tolist()):
        level = keep * level + step
        path[place] = level
    return path


def _conversations(open_at_once: int, between: float) -> Draw:
    """Requests of conversations of TURNS turns, so many open at a time, that differ by `between`."""

    def draw(rng: Random, n: int, fallen: Floats) -> tuple[Floats, Ints]:
        slot = rng.integers(0, open_at_once, n)
        of_slot = np.zeros(n, dtype=np.int64)
        for number in range(open_at_once):
            own = np.flatnonzero(slot == number)
            of_slot[own] = np.arange(len(own)) // TURNS
        apart = rng.normal(0.0, between, (open_at_once, n // TURNS + 1))
        mean = MEAN + apart[slot, of_slot]
        within = math.sqrt(max(BETWEEN_REQUESTS**2 - between**2, 0.05**2))
        return beta(rng, mean, within) - fallen, rng.integers(20, 200, n)

    return draw


def _alike(rng: Random, n: int, fallen: Floats) -> tuple[Floats, Ints]:
    """Requests that do not depend on each other."""
    return beta(rng, np.full(n, MEAN), BETWEEN_REQUESTS) - fallen, rng.integers(20, 200, n)


def _users(memory: float, deviation: float) -> Draw:
    """Requests of users without a segment, whose mean acceptance wanders slowly."""

    def draw(rng: Random, n: int, fallen: Floats) -> tuple[Floats, Ints]:
        mean = MEAN + deviation * wander(rng, n, memory)
        return beta(rng, mean, BETWEEN_REQUESTS) - fallen, rng.integers(20, 200, n)

    return draw


_CONVERSATIONS = Dependent(
    "conversations, unnamed, 20 at a time, that differ more", "request", _conversations(20, 0.12)
)
_USERS = Dependent("users, unnamed, wander slowly", "request", _users(300.0, 0.05))
DEPENDENT = (
    Dependent("windows: requests of 150 s, 20 running", "window", _long_requests(150.0)),
    Dependent("windows: requests of 60 s, 20 running", "window", _long_requests(60.0)),
    Dependent("windows: mix of three tasks, memory of 100 windows", "window", _mix(100.0, 20)),
    Dependent("windows: mix of three tasks, memory of 1,000 windows", "window", _mix(1_000.0, 20)),
    Dependent("windows: mix of three tasks between none and all", "window", _mix(None, 20)),
    Dependent("windows: 3 requests each", "window", _few_requests(3.0)),
    Dependent("conversations, unnamed, one at a time", "request", _conversations(1, 0.085)),
    Dependent("conversations, unnamed, 5 at a time", "request", _conversations(5, 0.085)),
    Dependent("conversations, unnamed, 20 at a time", "request", _conversations(20, 0.085)),
    _CONVERSATIONS,
    _USERS,
    Dependent("the same, in three segments", "request", _users(100.0, 0.05), segments=3),
    Dependent(
        "conversations, unnamed, 20 at a time in each of three segments",
        "request",
        _conversations(20, 0.085),
        segments=3,
    ),
)
LIFETIME_TOLD = (
    Dependent(
        "windows: requests of 150 s, told by running and started ones", "window", _long_requests(150.0), 150.0
    ),
    Dependent(
        "windows: requests of 60 s, told by running and started ones", "window", _long_requests(60.0), 60.0
    ),
)
FEW_AN_HOUR = (
    *(replace(_USERS, apart=seconds) for seconds in (30.0, 120.0)),
    *(replace(_CONVERSATIONS, apart=seconds) for seconds in (60.0, 180.0)),
)
FEW_REQUESTS = (
    (Dependent("windows: 5 requests each", "window", _few_requests(5.0)), 0.05),
    (Dependent("windows: 1 request each", "window", _few_requests(1.0)), 0.10),
)

INDEPENDENT = Dependent("independent requests", "request", _alike)
