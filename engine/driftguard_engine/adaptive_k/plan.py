"""How many tokens each row of a step drafts, and why: the answer of whoever decides. No tensors.

Whoever decodes asks `plan` before a step and tells `learned` after it; the next plan may be asked for first.
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
    "probing",  # a few steps with another K, so that what it gives stays known
    "best",
    "below_break_even",  # off: it pays at no batch size that was measured
    "high_concurrency",  # off: it would pay in a smaller batch
    "request_limit",  # this request's own acceptance is not worth the step's K
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

    limited: rows whose own acceptance is not worth the step's K. For a probe, what is expected: seconds that
    it takes, and the rate (tokens per second) of the K in use.
    """

    rows: tuple[DraftingRow, ...]
    counts: tuple[int, ...]
    k: int
    reason: Reason
    limited: int = 0
    seconds: float = math.inf
    rate: float | None = None


class Given(NamedTuple):
    """What a step gave one request. `most`: draft tokens that it could have had at the step's beginning."""

    most: int
    accepted: int


@dataclass(frozen=True, slots=True)
class Decision:
    """What was decided last, and from what.

    seconds_per_step: for K = 0, 1, ... at this batch size, empty while not known. speedup: expected tokens
    per second with the best K > 0 as a multiple of those without. acceptance: of the first draft token.
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
