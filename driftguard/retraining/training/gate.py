"""The gate: promote or reject a candidate, by measured acceptance and time, never by training loss.

For every traffic group (the changed traffic, and each segment of the older traffic) both drafts score
the same held-out requests, so that differences are taken within a request:

    d_i = the part of single draft tokens of request i that the target keeps, of the candidate's less of those
          of the draft in service
    bounds of the mean: mean(d) -/+ t_{1-alpha, n-1} * sd(d) / sqrt(n)      (Student, one-sided)

Promote when all of these hold:

1. gain: over the held-out requests of the changed groups together, mean(d) >= minimum_gain and the
   lower bound of mean(d) is above 0;
2. no regression: in every group with at least `minimum_group` held-out requests, the upper bound of the
   loss -mean(d) is at most maximum_regression. Smaller groups are tested together as one, and where even
   that is too little they are named as untested: a handful of requests can neither show nor exclude a loss;
3. time: the predicted seconds per token, (K * draft token + target step) / emitted per step, are not
   above those of the draft in service on the changed groups, and on all of them not by more than
   TIMING_NOISE. Not tested where no times were measured.

Acceptance as records count it, accepted per draft token at the K in use, is told beside these tests: what a
server would accept for the held-out answers / what it would draft (driftguard_training.serving), with the 95%
interval of a ratio of sums over requests (`comparisons.rate_of`, Student).

Guarantee: if the candidate in truth loses more than maximum_regression in at least one tested group, or
gains nothing in the changed ones, it is promoted with probability at most alpha. No correction for the
number of groups is needed, because promotion asks every test to pass (an intersection-union test: Berger,
Technometrics 24, 1982). Assumptions: held-out requests are independent draws of the traffic (requests of
one conversation are not; captures carry no session), and n is large enough for a mean of differences in
[-1, 1] to be about normal, which is what minimum_group is for.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from driftguard.diagnosis.comparisons import Rate, interval, rate_of
from driftguard.records.documents.acceptance import from_to
from driftguard.records.documents.retraining_run import Comparison, Costs, Decision, GateRules

TIMING_NOISE = 0.05  # relative; times of forward passes differ by this much between runs
SMALL_GROUPS = "small groups together"


@dataclass(frozen=True, slots=True)
class DraftScores:
    """One draft on the held-out requests of a group."""

    kept: Sequence[float]  # [n] part of single draft tokens that the target keeps
    drafted: Sequence[float]  # [n] expected draft tokens at the K in use
    accepted: Sequence[float]  # [n]
    steps: float  # expected, of all requests


@dataclass(frozen=True, slots=True)
class GroupScores:
    """Both drafts on one group's held-out requests, in the same order."""

    group: str
    changed: bool
    positions: int  # output tokens of these requests
    parent: DraftScores
    candidate: DraftScores

    def __post_init__(self) -> None:
        lengths = {
            len(values)
            for draft in (self.parent, self.candidate)
            for values in (draft.kept, draft.drafted, draft.accepted)
        }
        if len(lengths) != 1 or not self.parent.kept:
            raise ValueError(
                f"{self.group}: {len(self.parent.kept)} scores of the draft in service and "
                f"{len(self.candidate.kept)} of the candidate; pairs are needed"
            )

    @property
    def requests(self) -> int:
        return len(self.parent.kept)


def decide(
    groups: Sequence[GroupScores], costs: Costs, rules: GateRules, *, of_asked: bool = False
) -> Decision:
    """The gate. `of_asked`: `drafted` of the scores is all that K allows in each step, of which lookups draft
    a part. Raises ValueError when no group is changed traffic: there would be nothing to gain."""
    changed = [group for group in groups if group.changed]
    if not changed:
        raise ValueError("no held-out requests of the changed traffic")
    k = costs.num_speculative_tokens
    gain = _compare("changed traffic", True, changed, rules.alpha)
    compared, untested = _compare_groups(groups, rules)
    seconds = _seconds_per_token(groups, changed, costs)
    told = _told(gain, k, of_asked=of_asked) if seconds else _told_of_lookups(gain)
    objections = [
        *_objections_to_gain(gain, rules, told, drafts=bool(seconds)),
        *(text for group in compared for text in _objections_to_loss(group, rules)),
        *_objections_to_time(seconds),
    ]
    reason = "; ".join(objections) or _praise(told, seconds, untested)
    return Decision(not objections, reason, gain, compared, untested, seconds, rules, of_asked)


def _compare(name: str, changed: bool, groups: Sequence[GroupScores], alpha: float) -> Comparison:
    parent = np.concatenate([group.parent.kept for group in groups])
    candidate = np.concatenate([group.candidate.kept for group in groups])
    difference = candidate - parent
    requests = len(difference)
    error = float(difference.std(ddof=1)) / math.sqrt(requests) if requests > 1 else math.inf
    gain = interval(float(difference.mean()), error, requests - 1, 1 - 2 * alpha)
    accepted = _accepted(group.parent for group in groups)
    expected = _accepted(group.candidate for group in groups)
    return Comparison(
        name,
        changed,
        requests,
        float(parent.mean()),
        float(candidate.mean()),
        gain.change,
        max(gain.low, -1.0),  # rates lie in [0, 1], so differences in [-1, 1]
        min(gain.high, 1.0),
        accepted.rate if accepted else None,
        expected.rate if expected else None,
        _margin(expected) if expected else None,
        expected.requests if expected else None,
    )


def _accepted(scores: Iterable[DraftScores]) -> Rate | None:
    """Per draft token; None where nothing is drafted."""
    return rate_of(pair for one in scores for pair in zip(one.drafted, one.accepted, strict=True))


def _margin(rate: Rate) -> float:
    """Half of its 95% interval; of one request the error is the largest there can be."""
    return interval(rate.rate, rate.error, max(rate.requests - 1, 1), 0.95).high - rate.rate


def _compare_groups(
    groups: Sequence[GroupScores], rules: GateRules
) -> tuple[tuple[Comparison, ...], tuple[str, ...]]:
    """(tested groups, names of the untested): each group by itself, the small ones together."""
    small = [group for group in groups if group.requests < rules.minimum_group]
    large = [group for group in groups if group.requests >= rules.minimum_group]
    compared = [_compare(group.group, group.changed, [group], rules.alpha) for group in large]
    if sum(group.requests for group in small) < rules.minimum_group:
        return tuple(compared), tuple(group.group for group in small)
    name = f"{SMALL_GROUPS} ({', '.join(group.group for group in small)})"
    compared.append(_compare(name, all(group.changed for group in small), small, rules.alpha))
    return tuple(compared), ()


def _seconds_per_token(
    groups: Sequence[GroupScores], changed: Sequence[GroupScores], costs: Costs
) -> dict[str, float]:
    """Predicted seconds per emitted token with one request in flight, of both drafts. Empty without times."""
    k, target_step = costs.num_speculative_tokens, costs.seconds_per_target_step
    parent, candidate = costs.parent_seconds_per_draft_token, costs.candidate_seconds_per_draft_token
    if target_step is None or parent is None or candidate is None:
        return {}
    parent_step, candidate_step = k * parent + target_step, k * candidate + target_step
    found = {}
    for where, some in (("changed", changed), ("all", groups)):
        positions = sum(group.positions for group in some)
        found[f"{where}_parent"] = parent_step * sum(group.parent.steps for group in some) / positions
        found[f"{where}_candidate"] = (
            candidate_step * sum(group.candidate.steps for group in some) / positions
        )
    return found


def _objections_to_gain(gain: Comparison, rules: GateRules, told: str, *, drafts: bool) -> Iterator[str]:
    """drafts: what a server would draft is known, and not only what single draft tokens would be kept."""
    if drafts and gain.accepted_candidate is None:
        yield told
    elif gain.difference < rules.minimum_gain:
        digits = _decimals(3, rules.minimum_gain, gain.difference)
        yield (
            f"{told}; a gain of {rules.minimum_gain:+.{digits}f} in single draft tokens is needed, and it is "
            f"{gain.difference:+.{digits}f}"
        )
    elif gain.lower <= 0:
        digits = _decimals(3, gain.lower, 0.0)
        yield (
            f"{told}; the gain of {gain.difference:+.3f} in single draft tokens may be chance: over "
            f"{gain.requests} held-out requests its lower {1 - rules.alpha:.0%} bound is "
            f"{gain.lower:+.{digits}f}"
        )


def _objections_to_loss(group: Comparison, rules: GateRules) -> Iterator[str]:
    largest_loss = -group.lower
    if largest_loss > rules.maximum_regression:
        digits = _decimals(3, rules.maximum_regression, largest_loss)
        yield (
            f"{group.group}: a loss of {rules.maximum_regression:.{digits}f} in single draft tokens is not "
            f"excluded ({group.parent:.3f} kept, then {group.candidate:.3f}, over {group.requests} held-out "
            f"requests; a loss of up to {largest_loss:.{digits}f} at {1 - rules.alpha:.0%})"
        )


def _objections_to_time(seconds: Mapping[str, float]) -> Iterator[str]:
    for where, tolerance in (("changed", 0.0), ("all", TIMING_NOISE)) if seconds else ():
        parent, candidate = seconds[f"{where}_parent"], seconds[f"{where}_candidate"]
        if candidate > parent * (1 + tolerance):
            digits = _decimals(2, candidate * 1e3, parent * 1e3)
            yield (
                f"slower on {where} traffic: predicted {candidate * 1e3:.{digits}f} ms per token, "
                f"{parent * 1e3:.{digits}f} ms with the draft in service"
            )


def _decimals(fewest: int, one: float, other: float) -> int:
    """As many as it takes to tell the two apart: else the reason of a rejection contradicts it."""
    return next((n for n in range(fewest, 9) if f"{one:+.{n}f}" != f"{other:+.{n}f}"), fewest)


def _told(gain: Comparison, k: int, *, of_asked: bool) -> str:
    now, candidate, expected = gain.accepted_parent, gain.accepted_candidate, gain.expected_range()
    if now is None or candidate is None or expected is None:
        return "no held-out answer of the changed traffic is long enough to be drafted for"
    what = f"accepted of {k} draft tokens a step" if of_asked else f"accepted per draft token at K = {k}"
    return (
        f"{what} expected to go from {from_to(now, candidate)} "
        f"({from_to(*expected)} at 95%) on the changed traffic, by {gain.drafted_requests} held-out requests "
        f"(single draft tokens kept: {gain.parent:.3f}, then {gain.candidate:.3f})"
    )


def _told_of_lookups(gain: Comparison) -> str:
    return (
        f"of the tokens of held-out answers on the changed traffic, the corpus and the answer itself tell "
        f"{from_to(gain.parent, gain.candidate)}, by {gain.requests} requests; what the server remembers of "
        "recent answers is not in this"
    )


def _praise(told: str, seconds: Mapping[str, float], untested: Sequence[str]) -> str:
    if seconds:
        told += (
            f"; {seconds['changed_parent'] / seconds['changed_candidate']:.2f}x the tokens per second there"
        )
    tested = f"every tested group within the bound, too few requests to test {', '.join(untested)}"
    return f"{told}; " + (tested if untested else "no group regressed")
