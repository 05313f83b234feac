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
   TIMING_NOISE.

Guarantee: if the candidate in truth loses more than maximum_regression in at least one tested group, or
gains nothing in the changed ones, it is promoted with probability at most alpha. No correction for the
number of groups is needed, because promotion asks every test to pass (an intersection-union test: Berger,
Technometrics 24, 1982). Assumptions: held-out requests are independent draws of the traffic (requests of
one conversation are not; captures carry no session), and n is large enough for a mean of differences in
[-1, 1] to be about normal, which is what minimum_group is for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.special import stdtrit

from driftguard.records.documents.retraining_run import Comparison, Costs, Decision, GateRules

TIMING_NOISE = 0.05  # relative; medians of repeated forward passes differ by this much between runs
SMALL_GROUPS = "small groups together"


@dataclass(frozen=True, slots=True)
class GroupScores:
    """Both drafts on one group's held-out requests; the two lists are in the same request order."""

    group: str
    changed: bool
    parent: Sequence[float]  # [n] acceptance per request
    candidate: Sequence[float]  # [n]
    positions: int  # output tokens of these requests
    parent_emitted_per_step: float
    candidate_emitted_per_step: float

    def __post_init__(self) -> None:
        if len(self.parent) != len(self.candidate) or not self.parent:
            raise ValueError(
                f"{self.group}: {len(self.parent)} scores of the draft in service and "
                f"{len(self.candidate)} of the candidate; pairs are needed"
            )


def decide(groups: Sequence[GroupScores], costs: Costs, rules: GateRules) -> Decision:
    """The gate. Raises ValueError when no group is changed traffic: there would be nothing to gain."""
    changed = [group for group in groups if group.changed]
    if not changed:
        raise ValueError("no held-out requests of the changed traffic")
    k = costs.num_speculative_tokens
    gain = _compare("changed traffic", True, changed, rules.alpha, k)
    compared, untested = _compare_groups(groups, rules, k)
    seconds = _seconds_per_token(groups, changed, costs)
    objections = [
        *_objections_to_gain(gain, rules),
        *(text for group in compared for text in _objections_to_loss(group, rules)),
        *_objections_to_time(seconds),
    ]
    reason = "; ".join(objections) or _praise(gain, seconds, untested)
    return Decision(not objections, reason, gain, compared, untested, seconds, rules)


def _compare(name: str, changed: bool, groups: Sequence[GroupScores], alpha: float, k: int) -> Comparison:
    parent = np.concatenate([group.parent for group in groups])
    candidate = np.concatenate([group.candidate for group in groups])
    difference = candidate - parent
    requests = len(difference)
    mean = float(difference.mean())
    margin = math.inf
    if requests > 1:
        spread = float(difference.std(ddof=1)) / math.sqrt(requests)
        margin = float(stdtrit(requests - 1, 1 - alpha)) * spread
    return Comparison(
        name,
        changed,
        requests,
        float(parent.mean()),
        float(candidate.mean()),
        mean,
        max(mean - margin, -1.0),  # rates lie in [0, 1], so differences in [-1, 1]
        min(mean + margin, 1.0),
        _accepted(groups, k, candidate=False),
        _accepted(groups, k, candidate=True),
    )


def _compare_groups(
    groups: Sequence[GroupScores], rules: GateRules, k: int
) -> tuple[tuple[Comparison, ...], tuple[str, ...]]:
    """(tested groups, names of the untested): each group by itself, the small ones together."""
    small = [group for group in groups if len(group.parent) < rules.minimum_group]
    large = [group for group in groups if len(group.parent) >= rules.minimum_group]
    compared = [_compare(group.group, group.changed, [group], rules.alpha, k) for group in large]
    if sum(len(group.parent) for group in small) < rules.minimum_group:
        return tuple(compared), tuple(group.group for group in small)
    name = f"{SMALL_GROUPS} ({', '.join(group.group for group in small)})"
    compared.append(_compare(name, all(group.changed for group in small), small, rules.alpha, k))
    return tuple(compared), ()


def _seconds_per_token(
    groups: Sequence[GroupScores], changed: Sequence[GroupScores], costs: Costs
) -> dict[str, float]:
    """Predicted seconds per emitted token with one request in flight, of both drafts."""
    k = costs.num_speculative_tokens
    parent_step = k * costs.parent_seconds_per_draft_token + costs.seconds_per_target_step
    candidate_step = k * costs.candidate_seconds_per_draft_token + costs.seconds_per_target_step

    def over(some: Sequence[GroupScores], step: float, *, candidate: bool) -> float:
        return step / _emitted_per_step(some, candidate=candidate)

    return {
        "changed_parent": over(changed, parent_step, candidate=False),
        "changed_candidate": over(changed, candidate_step, candidate=True),
        "all_parent": over(groups, parent_step, candidate=False),
        "all_candidate": over(groups, candidate_step, candidate=True),
    }


def _emitted_per_step(groups: Sequence[GroupScores], *, candidate: bool) -> float:
    """Of all groups together, with one of the two drafts."""
    steps = sum(
        group.positions / (group.candidate_emitted_per_step if candidate else group.parent_emitted_per_step)
        for group in groups
    )
    return sum(group.positions for group in groups) / steps


def _objections_to_gain(gain: Comparison, rules: GateRules) -> Iterator[str]:
    if gain.difference < rules.minimum_gain:
        yield (
            f"{_told(gain)}; a gain of {rules.minimum_gain:+.3f} in single draft tokens is needed, and it is "
            f"{gain.difference:+.3f}"
        )
    elif gain.lower <= 0:
        yield (
            f"{_told(gain)}; the gain of {gain.difference:+.3f} in single draft tokens may be chance: over "
            f"{gain.requests} held-out requests its lower {1 - rules.alpha:.0%} bound is {gain.lower:+.3f}"
        )


def _objections_to_loss(group: Comparison, rules: GateRules) -> Iterator[str]:
    largest_loss = -group.lower
    if largest_loss > rules.maximum_regression:
        yield (
            f"{group.group}: a loss of {rules.maximum_regression:.3f} in single draft tokens is not excluded "
            f"({group.parent:.3f} kept, then {group.candidate:.3f}, over {group.requests} held-out requests; "
            f"a loss of up to {largest_loss:.3f} at {1 - rules.alpha:.0%})"
        )


def _objections_to_time(seconds: Mapping[str, float]) -> Iterator[str]:
    for where, tolerance in (("changed", 0.0), ("all", TIMING_NOISE)):
        parent, candidate = seconds[f"{where}_parent"], seconds[f"{where}_candidate"]
        if candidate > parent * (1 + tolerance):
            yield (
                f"slower on {where} traffic: predicted {candidate * 1e3:.2f} ms per token, "
                f"{parent * 1e3:.2f} ms with the draft in service"
            )


def _accepted(groups: Sequence[GroupScores], k: int, *, candidate: bool) -> float:
    """Per draft token: a step emits those that it accepts, and one more."""
    return (_emitted_per_step(groups, candidate=candidate) - 1.0) / k


def _told(gain: Comparison) -> str:
    return (
        f"acceptance on the changed traffic from {gain.accepted_parent:.3f} to "
        f"{gain.accepted_candidate:.3f}, predicted (single draft tokens kept: {gain.parent:.3f}, then "
        f"{gain.candidate:.3f})"
    )


def _praise(gain: Comparison, seconds: Mapping[str, float], untested: Sequence[str]) -> str:
    faster = seconds["changed_parent"] / seconds["changed_candidate"]
    tested = f"every tested group within the bound, too few requests to test {', '.join(untested)}"
    return (
        f"{_told(gain)} over {gain.requests} held-out requests, {faster:.2f}x the tokens per second there, "
        + (tested if untested else "no group regressed")
    )
