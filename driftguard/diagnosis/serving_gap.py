"""Captured requests scored with the registered target and draft: does the server accept what both account
for, before and after the change alike?

The gap is served less offline acceptance, of the same answers, so that the traffic cancels out of it. It
opens where the engine does not serve these models faithfully any more (cache, weights, quantisation,
positions); it stays where the draft fits the requests less. Only its movement is judged: an engine with
top-k or top-p has a gap of its own on both sides. Engines keep draft tokens by one of two rules
(driftguard_training.serving), and how far these lie apart follows the text: where the engine's rule is not
known, only what is so under both is shown.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
from numpy.typing import NDArray

from driftguard.diagnosis.captured_requests import MINIMUM_SAMPLE, conversations_of
from driftguard.diagnosis.comparisons import (
    EXCLUDED_SHARE,
    LEVEL,
    MAIN_SHARE,
    Difference,
    Pair,
    Rate,
    combined_difference,
    difference_of,
)
from driftguard.diagnosis.evidence import Captured
from driftguard.diagnosis.probes import RELEVANT_SHARE
from driftguard.records.documents.serving_scores import Rule, SegmentScores, ServingScores, SideScores

OTHER_TARGET: Final = 0.1  # nats per token: other rounding of the same weights moves it by less
SAME_TARGET: Final = 0.2  # a target with other weights moves it by more

Behaviour = Literal["opened", "opened_less", "steady", "unclear"]
Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Expected:
    """Counts of a faithful engine. `accepted`: before the tokens were drawn; `accepted_of_answer`: given that
    this answer came of them, which is what served acceptance is compared with."""

    drafted: float
    accepted: float
    accepted_of_answer: float


@dataclass(frozen=True, slots=True)
class ScoredRequest:
    """A captured request with the counts of its record, and its score: expected counts by either rule, and
    the sum of the surprise of its tokens, see driftguard_training.serving."""

    captured: Captured
    rejection: Expected
    match: Expected
    surprise: float
    tokens: int


@dataclass(frozen=True, slots=True)
class ServingGap:
    """Inside segments, each weighted by what was drafted after. `opened`: change of the gap; `offline`, of
    offline acceptance; `surprise`, of the surprise, in nats per token. `by_match`: the same by the other
    rule, where the engine's is not known."""

    requests_before: int
    requests_after: int
    served_before: float
    served_after: float
    offline_before: float
    offline_after: float
    opened: Difference
    offline: Difference
    surprise: Difference
    by_match: ServingGap | None = None

    def behaviour(self, move: float) -> Behaviour:
        """Against the traffic's signed `move`. "opened": by at least half of it; "opened_less": by a part.
        "steady": the interval excludes half of it. By both rules, where the engine's is not known."""
        found = self._by_one_rule(move)
        other = self.by_match.behaviour(move) if self.by_match is not None else found
        if found == other:
            return found
        return "opened_less" if {found, other} == {"opened", "opened_less"} else "unclear"

    def _by_one_rule(self, move: float) -> Behaviour:
        if self.opened.follows(move, MAIN_SHARE):
            return "opened"
        if self.opened.follows(move, RELEVANT_SHARE):
            return "opened_less"
        return "steady" if self.opened.excludes(EXCLUDED_SHARE * abs(move)) else "unclear"

    def offline_moved(self, move: float, served: Difference | None) -> bool:
        """By at least half of the traffic's `move`: the draft fits the requests less.

        Shown of the scored requests alone; or by `served`, the change of acceptance of all requests, less
        that of the gap, which leaves that of the models: a difference estimator, where these must not exclude
        it. Both errors hold the coins of the same requests, so that its interval is too wide rather than too
        narrow.
        Paper: Cochran, Sampling Techniques (1977), section 7.9.
        """
        if self.by_match is not None and not self.by_match.offline_moved(move, served):
            return False
        if self.offline.follows(move, MAIN_SHARE):
            return True
        if served is None or not self.offline.may_follow(move, MAIN_SHARE):
            return False
        return difference_of(served, self.opened).follows(move, MAIN_SHARE)

    def rules_disagree(self, move: float) -> bool:
        """What is shown depends on the engine's rule, which is not known."""
        return self.by_match is not None and self._by_one_rule(move) != self.by_match.behaviour(move)

    @property
    def answers_are_others(self) -> bool:
        """The answers are not drawn from the registered target, as they were before."""
        return self.surprise.p_value <= LEVEL and self.surprise.change >= OTHER_TARGET

    @property
    def answers_are_own(self) -> bool:
        """The interval excludes such a target."""
        return self.surprise.high < SAME_TARGET


def summarised(
    before: Sequence[ScoredRequest],
    after: Sequence[ScoredRequest],
    changed: Sequence[str],
    rule: Rule | None,
) -> ServingScores | None:
    """By the engine's `rule`, or by both where it is not known. None where no changed segment has
    MINIMUM_SAMPLE scored requests on both sides."""
    segments = _segments(before, after, changed, rule or "rejection")
    if not segments:
        return None
    return ServingScores(segments, _segments(before, after, changed, "match") if rule is None else ())


def _segments(
    before: Sequence[ScoredRequest], after: Sequence[ScoredRequest], changed: Sequence[str], rule: Rule
) -> tuple[SegmentScores, ...]:
    found = []
    for segment in changed:
        old, new = ([one for one in side if one.captured.segment == segment] for side in (before, after))
        if min(len(old), len(new)) >= MINIMUM_SAMPLE:
            found.append(SegmentScores(segment, _side(old, rule), _side(new, rule)))
    return tuple(found)


def _side(requests: Sequence[ScoredRequest], rule: Rule) -> SideScores:
    """Ratios of sums over conversations with linearised errors (see `comparisons.rate_of`). The error of the
    gap is that of a difference of two ratios of the same units: sum (e_served - e_accounted)^2, with each
    ratio's e = (a - r d) / sum d."""
    numbers = np.array(conversations_of([one.captured for one in requests]))
    columns = np.array([_row(one, one.match if rule == "match" else one.rejection) for one in requests])
    units = np.array([columns[numbers == number].sum(axis=0) for number in np.unique(numbers)])
    served, of_served = _ratio(units[:, 1], units[:, 0])
    offline, of_offline = _ratio(units[:, 3], units[:, 2])
    accounted, of_accounted = _ratio(units[:, 4], units[:, 2])
    surprise, of_surprise = _ratio(units[:, 6], units[:, 5])
    return SideScores(
        requests=len(requests),
        units=len(units),
        drafted=int(columns[:, 0].sum()),
        served=served,
        served_error=_error(of_served),
        offline=offline,
        offline_error=_error(of_offline),
        gap=served - accounted,
        gap_error=_error(of_served - of_accounted),
        surprise=surprise,
        surprise_error=_error(of_surprise),
    )


def _row(one: ScoredRequest, expected: Expected) -> tuple[float, ...]:
    served = float(one.captured.drafted or 0), float(one.captured.accepted or 0)
    counts = expected.drafted, expected.accepted, expected.accepted_of_answer
    return *served, *counts, float(one.tokens), one.surprise


def _ratio(counts: Floats, of: Floats) -> tuple[float, Floats]:
    """sum counts / sum of, and what each unit adds to its error."""
    total = float(of.sum())
    if total == 0.0:
        return 0.0, np.zeros(len(of))
    ratio = float(counts.sum()) / total
    return ratio, (counts - ratio * of) / total


def _error(parts: Floats) -> float:
    n = len(parts)
    return math.sqrt(n / max(n - 1, 1) * float(np.sum(parts**2)))


def compare(scores: ServingScores, changed: Collection[str]) -> ServingGap | None:
    """Of the changed segments. None where none is scored, or a side of each is one conversation."""
    found = _gap(scores.segments, changed)
    return replace(found, by_match=_gap(scores.by_match, changed)) if found is not None else None


def _gap(scored: Sequence[SegmentScores], changed: Collection[str]) -> ServingGap | None:
    segments = [one for one in scored if one.segment in changed]
    opened = _change(segments, "gap")
    offline, surprise = _change(segments, "offline"), _change(segments, "surprise")
    if opened is None or offline is None or surprise is None:
        return None
    return ServingGap(
        requests_before=sum(one.before.requests for one in segments),
        requests_after=sum(one.after.requests for one in segments),
        served_before=_mean(segments, [one.before.served for one in segments]),
        served_after=_mean(segments, [one.after.served for one in segments]),
        offline_before=_mean(segments, [one.before.offline for one in segments]),
        offline_after=_mean(segments, [one.after.offline for one in segments]),
        opened=opened,
        offline=offline,
        surprise=surprise,
    )


def _change(
    segments: Sequence[SegmentScores], of: Literal["gap", "offline", "surprise"]
) -> Difference | None:
    return combined_difference([Pair(_rate(one.before, of), _rate(one.after, of)) for one in segments])


def _rate(side: SideScores, of: Literal["gap", "offline", "surprise"]) -> Rate:
    known = {
        "gap": (side.gap, side.gap_error),
        "offline": (side.offline, side.offline_error),
        "surprise": (side.surprise, side.surprise_error),
    }
    return Rate(side.units, side.drafted, *known[of])


def _mean(segments: Sequence[SegmentScores], values: Sequence[float]) -> float:
    return float(np.average(values, weights=[one.after.drafted for one in segments]))
