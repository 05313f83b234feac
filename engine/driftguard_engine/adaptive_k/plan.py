"""How many tokens each row of a step drafts, and why: what a policy answers. No tensors.

`plan` of a policy is called before a step, `learned` after it; the next step's `plan` may come in between.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

Reason = Literal[
    "fixed",  # K as configured or asked for
    "not_asked",  # no request may draft: speculation is switched off, or nothing is left to draft
    "learning",  # the cost of a step of this size is not known yet
    "probing",  # a few steps with another K, to measure what it gives now
    "best",
    "below_break_even",  # off: speculation pays at no batch size that was measured
    "high_concurrency",  # off: speculation would pay in a smaller batch
    "request_limit",  # this request is accepted too rarely for the step's K, and drafts fewer tokens
]
REASONS: Final[tuple[Reason, ...]] = get_args(Reason)


class DraftingRow(NamedTuple):
    """One row of a step. `wanted` is the K that it may have at most; `draft` the version of its draft."""

    request_id: str
    draft: str
    wanted: int


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """`counts` [B] draft tokens of each row, `k` the most of them.

    limited: rows that draft fewer than the step's K because they are accepted too rarely. seconds, rate: of a
    probe only, how long it is expected to take, and the tokens per second that the K in use would give.
    """

    rows: tuple[DraftingRow, ...]
    counts: tuple[int, ...]
    k: int
    reason: Reason
    limited: int = 0
    seconds: float = math.inf
    rate: float | None = None


class Given(NamedTuple):
    """The outcome of a step for one request. `most`: draft tokens that it could have had at its beginning."""

    most: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Decision:
    """The newest decision, and the numbers that it rests on.

    seconds_per_step: for K = 0, 1, ... at this batch size, empty while unknown. speedup: expected tokens per
    second with the best K > 0, divided by those with K = 0. acceptance: probability of the first draft token.
    """

    adaptive: bool
    rows: int = 0
    num_speculative_tokens: int | None = None
    reason: Reason = "not_asked"
    seconds_per_step: tuple[float, ...] = ()
    speedup: float | None = None
    acceptance: float | None = None


class FixedK:
    """Every request drafts what it was configured for."""

    def __init__(self) -> None:
        self.decision = Decision(adaptive=False, reason="fixed")
        self.reasons: Counter[Reason] = Counter(dict.fromkeys(REASONS, 0))

    def plan(self, rows: Sequence[DraftingRow]) -> DraftPlan:
        counts = tuple(row.wanted for row in rows)
        plan = DraftPlan(tuple(rows), counts, max(counts, default=0), "fixed")
        self.decision = Decision(False, len(rows), plan.k, plan.reason)
        self.reasons[plan.reason] += len(rows)
        return plan

    def learned(self, plan: DraftPlan, seconds: float | None, given: Mapping[str, Given]) -> None:
        """Nothing to learn."""
