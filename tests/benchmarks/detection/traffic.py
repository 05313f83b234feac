"""Simulated traffic of one stream: nine families, each with or without a real change.

Every request has a true acceptance p, beta-distributed around the mean of its segment with standard
deviation .12 between requests, and accepts Binomial(drafted, p) of 20 to 199 drafted tokens (as in
tests/detection/traffic.py). One request ends per second. From the change on, the means of the affected
segments are lower by `drop`, at once or along a ramp.

Everything that is not a count (segments, sessions, lengths, the counts before the change) is the same for
every drop of one seed, so that delays of different drops are compared on the same traffic.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from driftguard.detection import ObservationBatch
from tests.detection.traffic import BETWEEN_REQUESTS, START, wandering_mix

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Random = np.random.Generator

RAMP_REQUESTS = 2_000
DAY_REQUESTS = 86_400  # one request a second
SESSION_SPREAD = 0.10  # between sessions; the rest of .12 lies between the requests of a session
WITHIN_SESSION = float(np.sqrt(BETWEEN_REQUESTS**2 - SESSION_SPREAD**2))
LONGEST_SESSION = 14
OPEN_SESSIONS = 16
LENGTH_CORRELATION = -0.6
REGIME_REQUESTS = 5_000  # mean time between jumps of the mix, or of the lengths


@dataclass(frozen=True, slots=True)
class Family:
    """What the traffic is like while nothing changes; `layout` draws everything but the counts."""

    name: str
    layout: Callable[[Random, int, int | None], Layout]


@dataclass(frozen=True, slots=True)
class Layout:
    """N requests without their counts; `mean` is what is expected of each while nothing changed."""

    names: tuple[str, ...]
    code: Ints  # [N] index into names
    mean: Floats  # [N]
    drafted: Ints  # [N]
    spread: float = BETWEEN_REQUESTS  # around the mean (in a session: around the session's own mean)
    affected: tuple[int, ...] | None = None  # segments that a change hits; None: all
    session: Ints | None = None  # [N]
    output_tokens: Ints | None = None  # [N]


@dataclass(frozen=True, slots=True)
class Change:
    """From request `start` on the means fall by `drop`, within `ramp` requests."""

    start: int
    drop: float
    ramp: int = 1

    def size(self, requests: int) -> Floats:
        """[requests] how far the means of affected segments have fallen."""
        age = np.arange(requests) - self.start + 1
        return self.drop * np.clip(age / self.ramp, 0.0, 1.0)


@dataclass(frozen=True, slots=True)
class Traffic:
    layout: Layout
    accepted: Ints  # [N]
    names: list[str] = field(repr=False)  # [N] segment of each request

    def __len__(self) -> int:
        return len(self.accepted)

    @property
    def x(self) -> Floats:
        return self.accepted / self.layout.drafted

    def part(self, start: int, stop: int) -> Traffic:
        layout, rows = self.layout, slice(start, stop)
        part = replace(
            layout,
            code=layout.code[rows],
            mean=layout.mean[rows],
            drafted=layout.drafted[rows],
            session=None if layout.session is None else layout.session[rows],
            output_tokens=None if layout.output_tokens is None else layout.output_tokens[rows],
        )
        return Traffic(part, self.accepted[rows], self.names[rows])

    def batch(self) -> ObservationBatch:
        layout, ordinals = self.layout, np.arange(1, len(self) + 1)
        return ObservationBatch.of(
            ordinals,
            self.names,
            layout.drafted,
            self.accepted,
            START + ordinals.astype(np.float64),
            session=() if layout.session is None else [f"s{number}" for number in layout.session.tolist()],
            output_tokens=() if layout.output_tokens is None else layout.output_tokens,
        )


def simulate(family: Family, seed: list[int], requests: int, change: Change | None = None) -> Traffic:
    """Requests of the family, reproducible from the seed."""
    for_layout, for_sessions, before, after = np.random.default_rng(seed).spawn(4)
    start = change.start if change else requests
    layout = family.layout(for_layout, requests, change.start if change else None)
    mean = layout.mean if layout.session is None else _session_means(for_sessions, layout)
    if change:
        hit = np.isin(layout.code, layout.affected) if layout.affected else np.ones(requests, dtype=bool)
        mean = mean - hit * change.size(requests)
    mean = np.clip(mean, 0.03, 0.97)
    accepted = np.concatenate(
        [
            _counts(before, mean[:start], layout.spread, layout.drafted[:start]),
            _counts(after, mean[start:], layout.spread, layout.drafted[start:]),
        ]
    )
    return Traffic(layout, accepted, [layout.names[index] for index in layout.code])


def _counts(rng: Random, mean: Floats, spread: float, drafted: Ints) -> Ints:
    precision = mean * (1.0 - mean) / spread**2 - 1.0
    return rng.binomial(drafted, rng.beta(mean * precision, (1.0 - mean) * precision))


def _session_means(rng: Random, layout: Layout) -> Floats:
    assert layout.session is not None
    mean = layout.mean[0]
    precision = mean * (1.0 - mean) / SESSION_SPREAD**2 - 1.0
    own = rng.beta(mean * precision, (1.0 - mean) * precision, int(layout.session.max()) + 1)
    return own[layout.session]


def _drafted(rng: Random, n: int) -> Ints:
    return rng.integers(20, 200, n)


def _segments(rng: Random, means: list[float], code: Ints, affected: tuple[int, ...] | None = None) -> Layout:
    names = tuple(f"segment {number}" for number in range(len(means)))
    return Layout(names, code, np.array(means)[code], _drafted(rng, len(code)), affected=affected)


def _draw_codes(rng: Random, shares: Floats) -> Ints:
    """Segments drawn with shares [N, C]."""
    code: Ints = (shares.cumsum(axis=1)[:, :-1] < rng.random((len(shares), 1))).sum(axis=1)
    return code


def _regimes(rng: Random, n: int, jump_at: int | None) -> Ints:
    """[n] of 0 and 1, jumping at random; around `jump_at` it is 0 before and 1 after, for 1,500 requests."""
    jumps = np.cumsum(rng.random(n) < 1.0 / REGIME_REQUESTS)
    state = (jumps + rng.integers(2)) % 2
    if jump_at is not None:
        state[max(jump_at - 1_500, 0) : jump_at] = 0
        state[jump_at : jump_at + 1_500] = 1
    return state


def _one_segment(rng: Random, n: int, _: int | None) -> Layout:
    return _segments(rng, [0.7], np.zeros(n, dtype=np.int64))


def _wandering(rng: Random, n: int, _: int | None) -> Layout:
    means = [0.75, 0.45, 0.65]
    return _segments(rng, means, wandering_mix(rng, n, ["", "", ""])[1])


def _daily(rng: Random, n: int, _: int | None) -> Layout:
    hour = 2.0 * np.pi * (np.arange(n) / DAY_REQUESTS + rng.random())
    shares = np.exp(2.0 * np.cos(hour[:, None] + 2.0 * np.pi * np.arange(3) / 3.0))
    return _segments(rng, [0.75, 0.45, 0.65], _draw_codes(rng, shares / shares.sum(axis=1, keepdims=True)))


def _jumping(rng: Random, n: int, jump_at: int | None) -> Layout:
    shares = np.array([[0.15, 0.70, 0.15], [0.70, 0.15, 0.15]])[_regimes(rng, n, jump_at)]
    return _segments(rng, [0.85, 0.35, 0.65], _draw_codes(rng, shares))


def _small_segment(rng: Random, n: int, _: int | None) -> Layout:
    return _with_small_segment(rng, _draw_codes(rng, np.tile([0.5, 0.5], (n, 1))))


def _small_segment_wandering(rng: Random, n: int, _: int | None) -> Layout:
    return _with_small_segment(rng, wandering_mix(rng, n, ["", ""])[1])


def _with_small_segment(rng: Random, others: Ints) -> Layout:
    """Two segments, and a third one that has a tenth of the traffic at any time and is hit alone."""
    code = np.where(rng.random(len(others)) < 0.10, 2, others)
    return _segments(rng, [0.75, 0.60, 0.70], code, affected=(2,))


def _in_sessions(rng: Random, session: Ints) -> Layout:
    n = len(session)
    code, mean = np.zeros(n, dtype=np.int64), np.full(n, 0.7)
    return Layout(("segment 0",), code, mean, _drafted(rng, n), WITHIN_SESSION, session=session)


def _session_lengths(rng: Random, n: int) -> Ints:
    return rng.integers(2, LONGEST_SESSION + 1, n // 2 + 2)


def _adjacent_sessions(rng: Random, n: int, _: int | None) -> Layout:
    lengths = _session_lengths(rng, n)
    return _in_sessions(rng, np.repeat(np.arange(len(lengths)), lengths)[:n])


def _interleaved_sessions(rng: Random, n: int, _: int | None) -> Layout:
    left = _session_lengths(rng, n).tolist()
    open_now, session = list(range(OPEN_SESSIONS)), np.zeros(n, dtype=np.int64)
    for place, chosen in enumerate(rng.integers(0, OPEN_SESSIONS, n).tolist()):
        number = open_now[chosen]
        session[place] = number
        left[number] -= 1
        if left[number] == 0:
            open_now[chosen] = max(open_now) + 1
    return _in_sessions(rng, session)


def _lengths(rng: Random, n: int, jump_at: int | None) -> Layout:
    """Longer answers accept less. Lengths jump by a standard deviation; acceptance given length stays."""
    z = rng.normal(0.0, 1.0, n) + np.where(_regimes(rng, n, jump_at) == 1, 0.5, -0.5)
    output_tokens = np.maximum(np.rint(120.0 * np.exp(0.5 * z)), 8).astype(np.int64)
    mean = np.clip(0.7 + LENGTH_CORRELATION * BETWEEN_REQUESTS * z, 0.1, 0.93)
    drafted = np.clip(output_tokens * 4 // 5, 20, 199)
    spread = BETWEEN_REQUESTS * float(np.sqrt(1.0 - LENGTH_CORRELATION**2))
    code = np.zeros(n, dtype=np.int64)
    return Layout(("segment 0",), code, mean, drafted, spread, output_tokens=output_tokens)


ONE_SEGMENT = Family("one segment", _one_segment)
FAMILIES = (
    ONE_SEGMENT,
    Family("three segments, wandering mix", _wandering),
    Family("three segments, daily mix", _daily),
    Family("three segments, jumping mix", _jumping),
    Family("three segments, steady mix", _small_segment),
    Family("sessions, adjacent", _adjacent_sessions),
    Family("sessions, interleaved", _interleaved_sessions),
    Family("lengths jump", _lengths),
    Family("two wandering segments and a steady 10%", _small_segment_wandering),
)


@dataclass(frozen=True, slots=True)
class Scenario:
    """A kind of change in traffic of a family."""

    name: str
    family: Family
    ramp: int = 1


SCENARIOS = (
    Scenario("one segment", FAMILIES[0]),
    Scenario("three segments, wandering mix", FAMILIES[1]),
    Scenario("three segments, daily mix", FAMILIES[2]),
    Scenario("Simpson: every segment falls, the aggregate rises", FAMILIES[3]),
    Scenario("only a 10% segment falls", FAMILIES[4]),
    Scenario("only a 10% segment falls, wandering mix", FAMILIES[8]),
    Scenario("sessions, adjacent", FAMILIES[5]),
    Scenario("sessions, interleaved", FAMILIES[6]),
    Scenario("lengths jump as well", FAMILIES[7]),
    Scenario("ramp over 2,000 requests", FAMILIES[0], ramp=RAMP_REQUESTS),
)
