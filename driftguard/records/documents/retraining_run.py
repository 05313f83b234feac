"""The documents of a retraining run: the gate's decision with its numbers, the watch, the rollout; and the
curve of its training."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

Verdict = Literal["watching", "worse", "stands"]


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Captured requests that were written for the training and for the gate. out_of_vocabulary: those that
    were not, because they have token ids that the target lacks."""

    train: int
    replay: int
    held_out: int
    out_of_vocabulary: int = 0


@dataclass(frozen=True, slots=True)
class Costs:
    """Measured seconds; None where a step takes as long with either draft.
    K is the number of draft tokens per step."""

    num_speculative_tokens: int
    seconds_per_target_step: float | None
    parent_seconds_per_draft_token: float | None
    candidate_seconds_per_draft_token: float | None


@dataclass(frozen=True, slots=True)
class GateRules:
    """The gate's requirements. Acceptance differences are absolute (0.02 is two points)."""

    minimum_gain: float
    maximum_regression: float
    alpha: float = 0.05
    minimum_group: int = 20  # held-out requests


@dataclass(frozen=True, slots=True)
class Comparison:
    """Paired comparison of one group. parent, candidate: parts of single draft tokens that the target keeps,
    means over requests; difference: of the two, with one-sided bounds. accepted_parent, accepted_candidate:
    accepted per draft token at the K in use, which is what records hold and pages call acceptance, as
    expected by these requests; accepted_margin: half the width of the 95% interval of accepted_candidate;
    drafted_requests: those among them that are long enough to be drafted for. None where nothing is drafted,
    or of a run of an earlier version."""

    group: str
    changed: bool
    requests: int
    parent: float
    candidate: float
    difference: float
    lower: float
    upper: float
    accepted_parent: float | None = None
    accepted_candidate: float | None = None
    accepted_margin: float | None = None
    drafted_requests: int | None = None

    def expected_range(self, live_requests: float = math.inf) -> tuple[float, float] | None:
        """The 95% interval of accepted_candidate; or with `live_requests`, the one in which the acceptance of
        so many requests of the same traffic lies, all of them drafted for. None where it is not known.

        Formula: accepted_candidate -/+ accepted_margin * sqrt(1 + drafted_requests / live_requests).
        Assumption: live requests differ among each other as the held-out ones do.
        Source: Hahn, Meeker, Statistical Intervals (1991), chapter 4, of the mean of m future observations.
        """
        margin, known = self.accepted_margin, self.drafted_requests
        if self.accepted_candidate is None or margin is None or known is None:
            return None
        half = margin * math.sqrt(1.0 + known / live_requests)
        return max(self.accepted_candidate - half, 0.0), min(self.accepted_candidate + half, 1.0)


@dataclass(frozen=True, slots=True)
class Decision:
    """Promote or reject, the reason, and all numbers behind it. of_asked: accepted_parent and
    accepted_candidate are not of the tokens that were drafted, but of all that K allows in each step."""

    promote: bool
    reason: str
    gain: Comparison
    groups: tuple[Comparison, ...]
    untested: tuple[str, ...]  # groups with too few held-out requests for the no-regression test
    seconds_per_token: Mapping[str, float]  # empty where no times were measured
    rules: GateRules
    of_asked: bool = False


@dataclass(frozen=True, slots=True)
class OldLevel:
    """The old draft's acceptance in one segment: statistics of x = accepted / drafted per request.

    by_first: of the first draft token alone, because K varied or was not told. k: of requests that told this
    K, and others are not compared with it."""

    segment: str
    changed: bool  # named by the incident
    requests: int
    mean: float
    variance: float  # between requests
    standard_error: float
    over_from: float | None = None  # mean from which on the fall is over; None: the baseline is not known
    half_from: float | None = None  # mean from which on half of the fall is won back; None: as above
    k: int | None = None
    by_first: bool = False


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
    over: tuple[float, ...] = ()  # as long as the others from the first request on
    shown_over: bool = False  # stays true
    half: tuple[float, ...] = ()  # as `over`
    shown_half: bool = False  # stays true

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
    over: bool = False  # every changed segment is shown to be back
    half: bool = False  # every changed segment is shown to have won back half of its fall
    unjudged_segments: tuple[str, ...] = ()  # changed ones of which the old draft had too few requests


@dataclass(frozen=True, slots=True)
class Heard:
    """When the newest record of a server had arrived and ended, by the clock of the sidecar that received it
    and by the server's: a later record is later by the same clocks. Null: none of the draft had come."""

    arrived_at: datetime | None = None
    ended_at: datetime | None = None


@dataclass(frozen=True, slots=True)
class Rollout:
    """A rollout or rollback under way: it waits for records of draft `version` that end and arrive after what
    was `heard` when it was asked for, which show that the draft is served.

    asked_at, until: by the clock of the database; after `until` a promotion has failed, and a rollback is
    tried again. heard: null where an earlier version asked; then they end and arrive after asked_at. reason:
    of a rollback.
    output: the end of what the command printed or the webhook answered. live: whether the draft is loaded
    without a restart; while it is `begun` the server may be paused. not_live: why a restart was asked for
    where engines.update_url is set.
    """

    version: str
    asked_at: datetime
    until: datetime
    reason: str = ""
    output: str = ""
    live: Literal["no", "begun", "done"] = "no"
    not_live: str = ""
    heard: Heard | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunNumbers:
    """The numbers of a run so far, including those behind the gate's decision. put_back_at: when its draft,
    which the engine had lost, was put back into service last, and before that within a day. was_stopped: it
    failed because its process was asked to end, as at a restart of the sidecar."""

    checksums_sha256: str | None = None  # the digest of the candidate's list of checksums
    requests: RequestCounts | None = None
    temperature: float | None = None  # of the sampling at which both drafts were scored
    costs: Costs | None = None
    measured_seconds_per_draft_token: tuple[float | None, ...] | None = None  # [draft in service, candidate]
    gate: Decision | None = None
    watch: Watch | None = None
    rollout: Rollout | None = None
    put_back_at: tuple[datetime, ...] = ()
    was_stopped: bool = False


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """What the training told of one step, and when. acceptance: part of single draft tokens that the target
    keeps."""

    step: int
    at: datetime
    loss: float
    acceptance: float


@dataclass(frozen=True, slots=True)
class Thinned:
    """Of `reports` so far every `stride`-th, beginning with the first one, and the newest."""

    points: tuple[CurvePoint, ...] = ()
    reports: int = 0
    stride: int = 1


@dataclass(frozen=True, slots=True)
class TrainingCurve:
    """training: of the requests of the newest batch (loss) and of the newest ten (acceptance). held_out: of
    some requests that are not trained on, always the same. left_out: reports that made no sense, and why the
    first of them did not."""

    training: Thinned = Thinned()
    held_out: Thinned = Thinned()
    left_out: int = 0
    left_out_reason: str | None = None
