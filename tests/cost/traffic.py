"""Timed requests of a server whose step time and acceptance are known."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from driftguard.cost import TimedRequest


def told(request: TimedRequest) -> dict[str, Any]:
    """Those of its fields that a record has too."""
    return {name: value for name, value in request._asdict().items() if name != "by_first"}


@dataclass(frozen=True, kw_only=True)
class Server:
    """t(K) = a + b K (+ speculating where K > 0), times a factor of each request; position i of a draft
    is accepted with accepts[i] where those before it were, or with the last of them beyond."""

    a: float = 0.020
    b: float = 0.002
    speculating: float = 0.0
    accepts: tuple[float, ...] = (0.8,)
    noise: float = 0.1  # standard deviation of the factor between requests
    tokens: int = 120  # of an answer, half of it to half as much again
    first_from_steps: bool = False  # the first output token comes from the first step, not from the prompt

    def step_seconds(self, k: int) -> float:
        return self.a + self.b * k + (self.speculating if k else 0.0)

    def tokens_per_step(self, k: int) -> float:
        reached, total = 1.0, 1.0
        for i in range(k):
            reached *= self.accepts[min(i, len(self.accepts) - 1)]
            total += reached
        return total

    def tokens_per_second(self, k: int) -> float:
        return self.tokens_per_step(k) / self.step_seconds(k)

    def serve(self, rng: np.random.Generator, count: int, k: int, **fixed: Any) -> list[TimedRequest]:
        start = fixed.pop("start", 0.0)
        return [self._request(rng, k, start + number, fixed) for number in range(count)]

    def _request(
        self, rng: np.random.Generator, k: int, ended_at: float, fixed: dict[str, Any]
    ) -> TimedRequest:
        tokens = int(rng.integers(self.tokens // 2, self.tokens * 3 // 2))
        accepts = [self.accepts[min(i, len(self.accepts) - 1)] for i in range(k)]
        kept = np.cumprod(rng.random((tokens, k)) < accepts, axis=1)
        steps = int(np.searchsorted((kept.sum(axis=1) + 1).cumsum(), tokens)) + 1
        per_position = kept[:steps].sum(axis=0).tolist()
        emitted = sum(per_position) + steps
        step = self.step_seconds(k) * float(np.clip(rng.normal(1.0, self.noise), 0.2, 5.0))
        timed = steps - 1 if self.first_from_steps else steps
        output = emitted if self.first_from_steps else emitted + 1
        values: dict[str, Any] = {
            "ended_at": ended_at,
            "segment": "chat",
            "num_speculative_tokens": k,
            "concurrency": 1,
            "steps": steps,
            "drafted": steps * k,
            "accepted": sum(per_position),
            "emitted": emitted,
            "accepted_per_position": per_position,
            "output_tokens": output,
            "time_per_output_token_seconds": step * timed / (output - 1),
        }
        return TimedRequest(**{**values, **fixed})
