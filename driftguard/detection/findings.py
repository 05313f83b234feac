"""What the detector says: findings (events at one observation) and a summary (the state now)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

from driftguard.records.documents.acceptance import Acceptance, AdjustedChange, Gradual

Direction = Literal["down", "up"]
Unit = Literal["requests", "windows"]  # what one observation is of
FactorName = Literal["day", "week", "prompt", "answer"]  # see factors.py
Scope = Literal["segments", "stream"]
Verdict = Literal["insufficient_data", "steady", "degraded", "improved", "drafting_stopped"]
# off_baseline: the interval of its recent requests excludes its baseline; not enough evidence for an alarm
SegmentVerdict = Literal["insufficient_data", "steady", "off_baseline", "degraded", "improved"]
SessionsGiven = Literal["given", "in part", "not given", "no requests"]  # counter windows have none
CloseReason = Literal["recovered", "no_traffic", "became_normal"]


class BaselineReason(StrEnum):
    """Why a baseline is begun."""

    FIRST = "first"  # of its segment
    SETTINGS_CHANGED = "settings_changed"  # against the segment's newest earlier one
    RELEARNED = "relearned"  # with the same settings
    ACCEPTED = "accepted"  # by an operator, as a new normal
    RISE_LASTED = "rise_lasted"


@dataclass(frozen=True, slots=True)
class ChangedSetting:
    """`name`: of the field of a record; `before`, `after`: in words."""

    name: str
    before: str
    after: str


@dataclass(frozen=True, slots=True)
class WhyBegun:
    """`changed`: the settings, of SETTINGS_CHANGED. `before_fall`: acceptance fell within the reference
    period, and the baseline is of what came before."""

    reason: BaselineReason
    changed: tuple[ChangedSetting, ...] = ()
    before_fall: bool = False

    @property
    def text(self) -> str:
        """For example: num_speculative_tokens changed from 4 to 6."""
        changes = "; ".join(f"{one.name} changed from {one.before} to {one.after}" for one in self.changed)
        told = changes or _REASONS[self.reason]
        return f"{told}; of what came before acceptance fell" if self.before_fall else told


_REASONS: Final[dict[BaselineReason, str]] = {
    BaselineReason.FIRST: "first baseline of the segment",
    BaselineReason.SETTINGS_CHANGED: "settings changed",
    BaselineReason.RELEARNED: "relearned",
    BaselineReason.ACCEPTED: "an operator accepted a new normal",
    BaselineReason.RISE_LASTED: "the rise lasted",
}


@dataclass(frozen=True, slots=True)
class NotWatched:
    """Traffic whose baseline is not known yet. `stratum`: what its requests have in common."""

    stratum: str
    why: WhyBegun

    @property
    def text(self) -> str:
        """For example: request, num_speculative_tokens 6: num_speculative_tokens changed from 4 to 6."""
        return f"{self.stratum}: {self.why.text}"


@dataclass(frozen=True, slots=True)
class StratumBaseline:
    """What a stratum's reference period says of it."""

    segment: str
    stratum: str  # what its requests have in common besides the segment
    ordinal: int
    ended_at: float  # seconds since 1970 UTC, of the last request of the reference period
    requests: int
    acceptance: Acceptance
    mean_per_request: float  # of accepted / drafted per request: what the bets are about
    fall_below: float  # safe baselines at the mean length: means per request between these are no change
    rise_above: float


@dataclass(frozen=True, slots=True)
class BaselineReady(StratumBaseline):
    """A stratum's reference period is complete; from the next request on it is watched."""

    why: WhyBegun
    since: float  # seconds since 1970 UTC, of the first request of the reference period
    standard_deviation: float  # of accepted / drafted between requests
    false_alarm_every: float  # A in use for the stream, requests
    variance_inflation: float  # of a mean of many requests, because they depend on each other; 1: they do not


@dataclass(frozen=True, slots=True)
class BaselineSettled(StratumBaseline):
    """A stratum's reference period has grown for the last time: its baseline does not change any more."""


@dataclass(frozen=True, slots=True)
class ProfileLearned:
    """What a stratum's requests are expected to accept depends on this factor from here on.

    Amplitude 0: no longer, because the cells with traffic (the hours, say) are others than before.
    """

    segment: str
    stratum: str
    ordinal: int  # the first request that it is used for
    ended_at: float  # seconds since 1970 UTC
    factor: FactorName
    cycles: int  # it was learned from
    amplitude: float  # half of what lies between the best and the worst cell


@dataclass(frozen=True, slots=True)
class SegmentChange:
    """One segment's acceptance before (reference period) and after (since the change point), as counted.

    `adjusted`: as it is tested; it lies on the alarm's side. None where a change is over.
    """

    segment: str
    before: Acceptance
    after: Acceptance
    evidence: float  # the segment's own sum M_c, to be compared with A
    adjusted: AdjustedChange | None = None


@dataclass(frozen=True, slots=True)
class DriftOpened:
    """The stream's acceptance changed. `change_point` and `interval` are ordinals of observations."""

    direction: Direction
    scope: Scope  # "segments": each named segment has its own evidence; "stream": only all of them together
    ordinal: int
    ended_at: float  # seconds since 1970 UTC, of the request that raised the alarm
    change_point: int
    change_point_at: float  # seconds since 1970 UTC
    interval: tuple[int, int]  # ordinals, both ends included
    interval_level: float
    segments: tuple[SegmentChange, ...]  # strongest evidence first, never empty
    gradual: Gradual | None  # None where it cannot have begun before `interval`
    adjusted: AdjustedChange  # of these segments together, in their mix since the change point
    before: Acceptance  # stream: what the traffic since the change point accepted at the baselines
    after: Acceptance  # stream: since the change point
    evidence: float  # at least false_alarm_every
    false_alarm_every: float  # A in use, requests
    requests_to_alarm: int  # requests of watched segments from the change point to the alarm, or windows
    unit: Unit = "requests"


@dataclass(frozen=True, slots=True)
class DriftWidened:
    """More segments changed while an incident of this direction is open. Ordinals are of observations."""

    direction: Direction
    ordinal: int
    ended_at: float  # seconds since 1970 UTC, of the request that raised the alarm
    change_point: int
    change_point_at: float  # seconds since 1970 UTC
    segments: tuple[SegmentChange, ...]  # that join, strongest evidence first, never empty
    requests_to_alarm: int  # of these segments, from the change point to the alarm, or windows
    unit: Unit = "requests"


@dataclass(frozen=True, slots=True)
class DriftSeenGradual:
    """Whether the change of an open incident came gradually, as it looks by now.

    Told where it surely did, and where that is less likely than it was told before.
    """

    direction: Direction
    ordinal: int
    ended_at: float  # seconds since 1970 UTC, of the newest request
    gradual: Gradual | None  # None where it cannot have begun before the interval of the change point


@dataclass(frozen=True, slots=True)
class DriftClosed:
    """The change is over, in all segments or in some. "no_traffic": the changed segments sent nothing for a
    whole history. "became_normal": the rise lasted, and its level is the baseline that is learned now."""

    direction: Direction
    ordinal: int
    ended_at: float  # seconds since 1970 UTC
    opened_ordinal: int
    change_point: int
    reason: CloseReason
    segments: tuple[SegmentChange, ...]  # after: since the recovery began, or since the change
    left: tuple[str, ...] = ()  # segments in which it goes on


@dataclass(frozen=True, slots=True)
class AlarmWithheld:
    """There is evidence, and yet the mean per request since the change point did not move that way: bets
    count the best requests only up to what the reference period had seen of them, and better ones came. The
    evidence of the direction starts anew."""

    direction: Direction
    ordinal: int
    ended_at: float  # seconds since 1970 UTC, of the request that raised the alarm
    evidence: float
    false_alarm_every: float  # A in use, requests


Finding = (
    BaselineReady
    | BaselineSettled
    | ProfileLearned
    | DriftOpened
    | DriftWidened
    | DriftSeenGradual
    | DriftClosed
    | AlarmWithheld
)


@dataclass(frozen=True, slots=True)
class ExpectedDelay:
    """From a drop of the segment's acceptance to its alarm, about half of the time sooner."""

    drop: float  # of the mean per request
    requests: float | None  # of the segment, or windows; None: not detectable (summary.py)
    seconds: float | None  # at the measured traffic; None where that is not known either
    unit: Unit = "requests"

    @property
    def text(self) -> str:
        """For example: a drop of 0.05: about 118 requests (2.0 h)."""
        if self.requests is None:
            return f"a drop of {self.drop:.2f}: not detectable"
        time = f" ({duration(self.seconds)})" if self.seconds is not None else ""
        return f"a drop of {self.drop:.2f}: about {math.ceil(self.requests):,} {self.unit}{time}"


def duration(seconds: float) -> str:
    """For example: 90 days, 5.6 h, 12 min, 3 s."""
    for unit, size in (("days", 86_400.0), ("h", 3_600.0), ("min", 60.0)):
        if seconds >= 2.0 * size:
            return f"{seconds / size:,.{0 if seconds >= 10.0 * size else 1}f} {unit}"
    return f"{math.ceil(seconds)} s"


@dataclass(frozen=True, slots=True)
class Follows:
    """What a segment's acceptance depends on, by half of what lies between its best and its worst cell."""

    factor: FactorName
    by: float

    @property
    def text(self) -> str:
        """For example: the hour of day, by 0.05 either way."""
        return f"{FACTOR_NAMES[self.factor]}, by {self.by:.2f} either way"


FACTOR_NAMES: Final[dict[FactorName, str]] = {
    "day": "the hour of day",
    "week": "the day of the week",
    "prompt": "the length of the prompt and the share of it that was cached",
    "answer": "the length of the answer, not by a line",
}


@dataclass(frozen=True, slots=True)
class SegmentSummary:
    """One segment now."""

    segment: str
    verdict: SegmentVerdict
    requests: int  # or windows, with drafted tokens, all time
    requests_needed: int  # at least so many more until its present traffic is watched; 0 once it is
    baseline: Acceptance | None  # of the strata of its recent requests; None until they are watched
    recent: Acceptance | None  # since the change point while an incident names it, else its newest requests
    mean_per_request: float | None
    standard_deviation: float | None
    # Of the present traffic: what is not watched yet, and why its baseline was begun. Sentences, where an
    # earlier version stored them.
    learning: NotWatched | str | None = None
    baseline_reason: WhyBegun | str | None = None
    expected_delays: tuple[ExpectedDelay, ...] = ()  # of the stratum of most of the present traffic
    variance_inflation: float = 1.0  # the largest of the strata of its recent requests
    # The same; while one of these is too young to show it, the largest that the segment has shown with any
    # settings.
    known_inflation: float | None = None
    follows: tuple[Follows, ...] = ()  # what its acceptance is expected to depend on
    length_of_acceptance: bool = False  # answer length is not used: it follows from acceptance (baseline.py)
    # Its stream is young, and has evidence for an alarm that waits: for about so many more requests of the
    # stream, after which it is raised if the evidence is still there (confirmation.py).
    alarm_waits: int | None = None
    unit: Unit = "requests"


def in_words(told: NotWatched | WhyBegun | str | None) -> str | None:
    """Of `learning` and `baseline_reason` of a segment."""
    return told if told is None or isinstance(told, str) else told.text


@dataclass(frozen=True, slots=True)
class StreamSummary:
    """One stream now. `since`: change point of the open incident, else the start of the verdict's data."""

    verdict: Verdict
    since: float | None  # seconds since 1970 UTC
    ordinal: int  # of the last observation folded, -1 before the first
    requests: int  # all observations, drafted or not
    undrafted: int  # observations without a drafted token: counted, never evidence
    requests_per_day: float  # of whole days, at first of the reference period; 0 until then
    false_alarm_every: float  # A in use, requests
    change_point: int | None  # of the open incident
    acceptance: Acceptance | None  # newest requests of all segments
    segments: tuple[SegmentSummary, ...]  # in order of first appearance
    # Do the requests name their session? Where not, and they depend on each other, `variance_inflation`
    # says how much: it is measured for as long as the stream lives.
    sessions: SessionsGiven = "not given"
    variance_inflation: float = 1.0  # the largest of any stratum
    windows_after_gap: int = 0  # began after a restart or a missed scrape: counted, never evidence
