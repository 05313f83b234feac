"""A simulated server with known step times and acceptances, to test a policy on."""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from driftguard_engine.adaptive_k.plan import DraftingRow, FixedK, Given
from driftguard_engine.adaptive_k.policy import AdaptiveK

Seconds = Callable[[Sequence[int]], float]  # of a step, from the draft tokens of each row
PAUSES = 0.01  # share of the steps that take eight times as long, as under other load


def seconds_of(*, plain: float, row: float, draft: float, token: float) -> Seconds:
    """plain + row x B + draft x K + token x (draft tokens of all rows), in milliseconds."""

    def seconds(counts: Sequence[int]) -> float:
        return (plain + row * len(counts) + draft * max(counts) + token * sum(counts)) / 1e3

    return seconds


@dataclass
class Server:
    """Rows never end, or after `answer_steps`. acceptance[i]: probability for a draft token of row i."""

    policy: AdaptiveK | FixedK
    seconds: Seconds
    acceptance: Sequence[float]
    wanted: int
    seed: int
    noise: float = 0.05  # sd of the logarithm of a measured time
    answer_steps: int | None = None
    slowness: float = 1.0
    clock: float = 0.0
    tokens: float = 0.0
    step: int = 0
    ks: Counter[int] = field(default_factory=Counter)
    drafted: Counter[int] = field(default_factory=Counter)  # by row
    newest: deque[int] = field(default_factory=lambda: deque(maxlen=1000))  # K of each step

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def run(self, steps: int) -> float:
        """Expected tokens per second of these steps, given what was drafted."""
        clock, tokens = self.clock, self.tokens
        for _ in range(steps):
            self._step()
        return (self.tokens - tokens) / (self.clock - clock)

    def run_batches(self, sizes: Sequence[int], acceptances: Sequence[float], batches: int) -> float:
        """Ten steps of each batch; mean of tokens per second divided by those of its best fixed K."""
        shares = []
        for _ in range(batches):
            size = self._random.choice(sizes)
            self.acceptance = [self._random.choice(acceptances) for _ in range(size)]
            best, _ = best_fixed(self.seconds, self.acceptance, self.wanted)
            shares.append(self.run(10) / best)
        return sum(shares) / len(shares)

    def counts_of_last(self, steps: int) -> set[int]:
        """Each K that was common among the newest steps."""
        found = Counter(list(self.newest)[-steps:])
        return {k for k, count in found.items() if count > steps / 4}

    def _step(self) -> None:
        self.step += 1
        life = self.answer_steps
        rows = [
            DraftingRow(f"{index}.{(self.step + 7 * index) // life if life else 0}", "v1", self.wanted)
            for index in range(len(self.acceptance))
        ]
        plan = self.policy.plan(rows)
        accepted = [self._accepted(p, count) for p, count in zip(self.acceptance, plan.counts, strict=True)]
        seconds = self.slowness * self.seconds(plan.counts)
        pause = 8.0 if self._random.random() < PAUSES else 1.0
        self.clock += seconds
        self.tokens += sum(map(tokens_of, self.acceptance, plan.counts))
        self.ks[plan.k] += 1
        self.newest.append(plan.k)
        for index, count in enumerate(plan.counts):
            self.drafted[index] += count
        given = {row.request_id: Given(row.wanted, kept) for row, kept in zip(rows, accepted, strict=True)}
        self.policy.learned(plan, seconds * pause * self._random.lognormvariate(0.0, self.noise), given)

    def _accepted(self, probability: float, count: int) -> int:
        kept = 0
        while kept < count and self._random.random() < probability:
            kept += 1
        return kept


def tokens_of(acceptance: float, k: int) -> float:
    """Expected tokens of one row in a step."""
    return sum(acceptance**position for position in range(k + 1))


def rate_of_fixed(k: int, seconds: Seconds, acceptance: Sequence[float]) -> float:
    """Expected tokens per second with this K for every row."""
    return sum(tokens_of(each, k) for each in acceptance) / seconds([k] * len(acceptance))


def best_fixed(seconds: Seconds, acceptance: Sequence[float], largest: int) -> tuple[float, int]:
    """(tokens per second, K)."""
    return max((rate_of_fixed(k, seconds, acceptance), k) for k in range(largest + 1))
