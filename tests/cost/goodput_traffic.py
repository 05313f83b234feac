"""Timed requests of a server whose speed follows its load, its moods and heavy tails."""

from __future__ import annotations

import math
from bisect import bisect_right
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from driftguard.cost import TimedRequest

SEGMENTS = {"chat": 0.7, "code": 0.27, "rare": 0.03}
_NAMES = list(SEGMENTS)
_UP_TO = list(accumulate(SEGMENTS.values()))
DRAWN_STEPS = 30


@dataclass(kw_only=True)
class Machine:
    """Seconds per step = (base + per_draft K) load^slope, times a mood that lasts and a heavy-tailed factor
    of each request.

    `load`: requests at once, around which the concurrency of each request lies. `daily`: it swings by this
    factor over a day. `mood`: standard deviation of the logarithm of a speed that wanders, an
    Ornstein-Uhlenbeck process of `mood_minutes`. `stalls`: part of the requests whose time is exp(Exp(1))
    times as long, a Pareto tail without a mean.
    """

    base: float = 0.020
    per_draft: float = 0.002
    slope: float = 0.5
    load: float = 12.0
    daily: float = 1.0
    mood: float = 0.05
    mood_minutes: float = 30.0
    noise: float = 0.2
    stalls: float = 0.05
    acceptance: float = 0.7
    slower: float = 1.0  # factor of all times
    seconds_apart: float = 10.0
    without: float = 0.0  # part of the requests that are served without speculation
    k: int = 4
    clock: float = 1_800_000_000.0
    state: float = 0.0  # of the mood, in standard deviations

    def serve(self, rng: np.random.Generator, count: int, **fixed: Any) -> list[TimedRequest]:
        return [self._one(rng, fixed) for _ in range(count)]

    def _one(self, rng: np.random.Generator, fixed: dict[str, Any]) -> TimedRequest:
        apart = float(rng.exponential(self.seconds_apart))
        self.clock += apart
        kept = math.exp(-apart / (60.0 * self.mood_minutes))
        self.state = kept * self.state + math.sqrt(1.0 - kept * kept) * float(rng.normal())
        k = 0 if rng.random() < self.without else self.k
        swing = self.daily ** math.sin(2.0 * math.pi * self.clock / 86_400.0)
        concurrency = max(int(rng.poisson(self.load * swing)), 1)
        factor = self.slower * concurrency**self.slope * math.exp(self.mood * self.state)
        factor *= math.exp(float(rng.normal(0.0, self.noise)))
        if rng.random() < self.stalls:
            factor *= math.exp(float(rng.exponential()))
        accepted = int(rng.binomial(DRAWN_STEPS * k, self.acceptance)) if k else 0
        emitted = DRAWN_STEPS + accepted
        step = (self.base + self.per_draft * k) * factor
        values: dict[str, Any] = {
            "ended_at": self.clock,
            "segment": _NAMES[bisect_right(_UP_TO, rng.random() * _UP_TO[-1])],
            "num_speculative_tokens": k,
            "concurrency": concurrency,
            "steps": DRAWN_STEPS,
            "drafted": DRAWN_STEPS * k,
            "accepted": accepted,
            "emitted": emitted,
            "accepted_per_position": None,
            "output_tokens": emitted + 1,
            "time_per_output_token_seconds": step * DRAWN_STEPS / emitted,
        }
        return TimedRequest(**{**values, **fixed})
