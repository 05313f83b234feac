"""Requests with speculation beside requests without, drawn at random, and what the watch says of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from driftguard.cost import TimedRequest, goodput
from driftguard.cost.times import concurrency_of
from driftguard.records.documents.goodput import GoodputWatch
from tests.cost.goodput_traffic import SEGMENTS

WINDOW = 300.0  # seconds
BAND = 4  # 9 to 16 requests at once
_STEPS = 30
_PARTS = 16  # of a window, in each of which the machine's speed is another


@dataclass(frozen=True, kw_only=True)
class Rivals:
    """`speculating`, `without`: of a window, on average. `faster`: by how much the logarithm of the time of
    those without is smaller. `noise`, `noise_speculating`: spread of single logarithms; one in twenty is
    exp(Exp(1)) times as slow besides. `mood`: how far the speed of all wanders within a window. `bursts`:
    those without come in one to three tasks a window, whose speeds differ by so much, and their number varies
    by a factor of e. `wander`: `faster` itself wanders by so much, for `wander_minutes`. `restarts`: part of
    the windows of which the first third is three times as slow. `daily`: the number without swings by this
    factor."""

    speculating: int = 20
    without: int = 60
    faster: float = 0.0
    noise: float = 0.25
    noise_speculating: float = 0.25
    mood: float = 0.05
    bursts: float = 0.0
    wander: float = 0.0
    wander_minutes: float = 60.0
    restarts: float = 0.0
    daily: float = 1.0

    def windows(self, rng: np.random.Generator, count: int) -> Iterator[list[TimedRequest]]:
        kept, state = math.exp(-WINDOW / 60.0 / self.wander_minutes), float(rng.normal())
        for number in range(count):
            state = kept * state + math.sqrt(1.0 - kept * kept) * float(rng.normal())
            yield self._window(rng, number, self.faster + self.wander * state)

    def _window(self, rng: np.random.Generator, number: int, faster: float) -> list[TimedRequest]:
        swing = self.daily ** math.sin(2.0 * math.pi * number * WINDOW / 86_400.0)
        swing *= math.exp(float(rng.normal())) if self.bursts else 1.0
        with_drafts = max(int(rng.poisson(self.speculating)), 1)
        count = with_drafts + int(rng.poisson(self.without * swing))
        drafts = rng.permutation(count) < with_drafts
        part = np.arange(count) * _PARTS // count
        logs = np.cumsum(rng.normal(0.0, self.mood / 4.0, _PARTS))[part]
        logs += rng.normal(0.0, 1.0, count) * np.where(drafts, self.noise_speculating, self.noise)
        logs += np.where(rng.random(count) < 0.05, rng.exponential(1.0, count), 0.0)
        tasks = rng.normal(0.0, self.bursts, 3)[rng.integers(0, rng.integers(1, 4), count)]
        logs += np.where(drafts, 0.0, tasks - faster)
        if rng.random() < self.restarts:
            logs += np.where(part < _PARTS // 3, math.log(3.0), 0.0)
        names = rng.choice(list(SEGMENTS), count, p=list(SEGMENTS.values()))
        at = (number + np.arange(count) / count) * WINDOW
        rows = zip(at.tolist(), names.tolist(), drafts.tolist(), np.exp(logs).tolist(), strict=True)
        return [_request(*row) for row in rows]


def _request(at: float, segment: str, has_drafts: bool, factor: float) -> TimedRequest:
    k = 4 * has_drafts
    return TimedRequest(
        ended_at=at,
        segment=segment,
        num_speculative_tokens=k,
        concurrency=12,
        steps=_STEPS,
        drafted=_STEPS * k,
        accepted=_STEPS * k // 2,
        emitted=_STEPS + _STEPS * k // 2,
        accepted_per_position=None,
        output_tokens=None,
        time_per_output_token_seconds=0.02 * factor,
    )


class RivalStream:
    """`level`: A. Every statement that speculation loses begins the evidence anew."""

    def __init__(self, seed: int, level: float) -> None:
        self.rng = np.random.default_rng(seed)
        self.level = level
        self.watch = GoodputWatch()
        self._seq = 0
        self._unread: list[goodput.Numbered] = []
        self._windows = 0

    def statements(self, rivals: Rivals, windows: int) -> list[int]:
        """Windows after which speculation was said to lose."""
        found = []
        for number, window in enumerate(rivals.windows(self.rng, windows), self._windows + 1):
            for request in window:
                self._seq += 1
                moved = request._replace(ended_at=request.ended_at + self._windows * WINDOW)
                self._unread.append(goodput.Numbered(self._seq, moved))
            self.watch = goodput.fold(self.watch, self._unread)
            self._unread = [item for item in self._unread if item.seq > self.watch.seq]
            if goodput.losing_in(self.watch, self.level, concurrency_of(BAND)) is not None:
                found.append(number)
                self.watch = goodput.closed(self.watch)
        self._windows += windows
        return found
