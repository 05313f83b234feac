"""The document of a retraining run: what the gate decided and on what, the watch, the rollout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

Verdict = Literal["watching", "worse", "stands"]


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Captured requests that were written for the training and for the gate."""

    train: int
    replay: int
    held_out: int


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured seconds. K is the number of draft tokens per step."""

    num_speculative_tokens: int
    seconds_per_target_step: float
    parent_seconds_per_draft_token: float
    candidate_seconds_per_draft_token: float


@dataclass(frozen=True, slots=True)
class GateRules:
    """What the gate asks for. Acceptance differences are absolute (0.02 is two points)."""

    minimum_gain: float
    maximum_regression: float
    alpha: float = 0.05
    minimum_group: int = 20  # held-out requests


@dataclass(frozen=True, slots=True)
class Comparison:
    """Paired comparison of one group: means over requests, and one-sided bounds of the mean difference."""

    group: str
    changed: bool
    requests: int
    parent: float
    candidate: float
    difference: float
    lower: float
    upper: float


@dataclass(frozen=True, slots=True)
class Decision:
    """Promote or reject, why, and everything that it was made on."""

    promote: bool
    reason: str
    gain: Comparison
    groups: tuple[Comparison, ...]
    untested: tuple[str, ...]  # groups with too few held-out requests for the no-regression test
    seconds_per_token: Mapping[str, float]
    rules: GateRules


@dataclass(frozen=True, slots=True)
class OldLevel:
    """What the old draft did in one segment: of x = accepted / drafted per request."""

    segment: str
    changed: bool  # named by the incident
    requests: int
    mean: float
    variance: float  # between requests
    standard_error: float


@dataclass(frozen=True, slots=True)
class SegmentWatch:
    """One segment of the promoted draft since the promotion. Wealth: one per bet, [BETS]."""

    old: OldLevel
    requests: int
    drafted: int
    accepted: int
    better: tuple[float, ...]
    worse: tuple[float, ...]
    shown_better: bool  # stays true

    @property
    def acceptance(self) -> float | None:
        return self.accepted / self.drafted if self.drafted else None


@dataclass(frozen=True, slots=True)
class Watch:
    """State of one watch; see driftguard.retraining.promotion.watch."""

    segments: tuple[SegmentWatch, ...]
    pooled_worse: tuple[float, ...]
    tolerance: float
    requests: int  # judged
    unjudged_requests: int
    recovered: bool  # every changed segment is shown better
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Rollout:
    """What a run that is rolling out, or back, waits for: records of draft `version` that end and arrive
    after `asked_at` show that it serves.

    until: then a promotion has failed, and a rollback is asked for again. reason: why it is rolled back.
    output: the end of what the command printed or the webhook answered.
    """

    version: str
    asked_at: datetime
    until: datetime
    reason: str = ""
    output: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNumbers:
    """What is known of a run so far. The gate's decision comes with all that it was made on."""

    checksums_sha256: str | None = None  # the digest of the candidate's list of checksums
    requests: RequestCounts | None = None
    temperature: float | None = None  # of the sampling at which both drafts were scored
    costs: Costs | None = None
    measured_seconds_per_draft_token: tuple[float, ...] | None = None  # [draft in service, candidate]
    gate: Decision | None = None
    watch: Watch | None = None
    rollout: Rollout | None = None
