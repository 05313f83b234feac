"""The gate promotes what is better on the changed traffic, costs nothing elsewhere, and is not slower."""

from __future__ import annotations

import numpy as np
import pytest

from driftguard.records.documents.retraining_run import Costs, Decision, GateRules
from driftguard.retraining.training.gate import GroupScores, decide

RULES = GateRules(minimum_gain=0.02, maximum_regression=0.02)
SAME_COST = Costs(4, 0.010, 0.001, 0.001)


def group(
    name: str,
    *,
    gain: float,
    changed: bool = False,
    requests: int = 100,
    level: float = 0.5,
    spread: float = 0.05,
    seed: int = 0,
) -> GroupScores:
    """Requests differ a lot from each other; the drafts differ by `gain` with a paired spread."""
    generator = np.random.default_rng(seed)
    parent = np.clip(generator.normal(level, 0.12, requests), 0, 1)
    noise = generator.normal(0, spread, requests)
    candidate = np.clip(parent + gain + noise - noise.mean(), 0, 1)
    emitted = [(1 - a**5) / (1 - a) for a in (parent.mean(), candidate.mean())]
    return GroupScores(name, changed, parent.tolist(), candidate.tolist(), requests * 50, *emitted)


def judge(*groups: GroupScores, costs: Costs = SAME_COST, rules: GateRules = RULES) -> Decision:
    return decide(groups, costs, rules)


def test_a_gain_without_regression_is_promoted() -> None:
    decision = judge(
        group("changed:german", gain=0.3, changed=True, level=0.4), group("older:code", gain=0.0)
    )
    assert decision.promote
    assert "0.4" in decision.reason
    assert "0.7" in decision.reason
    assert decision.gain.lower > 0.25


def test_acceptance_is_told_as_records_count_it() -> None:
    """Of K = 4 draft tokens of a step (a^1 + .. + a^4) are accepted, whatever part of single ones is."""
    fallen, older = group("changed:german", gain=0.3, changed=True, level=0.4), group("older:code", gain=0.0)
    decision = judge(fallen, older)
    (first, _) = decision.groups
    for told in (decision.gain, first):
        assert told.accepted_parent == pytest.approx((fallen.parent_emitted_per_step - 1) / 4)
        assert told.accepted_candidate == pytest.approx((fallen.candidate_emitted_per_step - 1) / 4)
    assert (
        f"from {decision.gain.accepted_parent:.3f} to {decision.gain.accepted_candidate:.3f}"
        in decision.reason
    )


def test_too_small_a_gain_is_rejected_although_it_is_certain() -> None:
    decision = judge(group("changed:german", gain=0.01, changed=True, spread=0.001))
    assert decision.gain.lower > 0
    assert not decision.promote
    assert "a gain of +0.020 in single draft tokens is needed" in decision.reason


def test_a_gain_that_may_be_chance_is_rejected() -> None:
    decision = judge(group("changed:german", gain=0.05, changed=True, requests=12, spread=0.3))
    assert not decision.promote
    assert "may be chance" in decision.reason


def test_one_regressing_segment_rejects_and_is_named() -> None:
    decision = judge(
        group("changed:german", gain=0.3, changed=True),
        group("older:code", gain=0.0, seed=1),
        group("older:english", gain=-0.06, seed=2),
    )
    assert not decision.promote
    assert "older:english" in decision.reason
    assert "older:code" not in decision.reason


def test_a_regression_that_few_requests_cannot_exclude_rejects() -> None:
    decision = judge(
        group("changed:german", gain=0.3, changed=True),
        group("older:code", gain=0.0, requests=25, spread=0.15),
    )
    assert not decision.promote
    assert "not excluded" in decision.reason


def test_small_groups_are_tested_together() -> None:
    small = [group(f"older:{name}", gain=-0.1, requests=8, seed=name) for name in range(4)]
    decision = judge(group("changed:german", gain=0.3, changed=True), *small)
    assert not decision.promote
    assert "small groups together" in decision.reason
    assert not decision.untested


def test_a_handful_of_requests_is_named_as_untested() -> None:
    decision = judge(
        group("changed:german", gain=0.3, changed=True), group("older:rare", gain=-0.2, requests=3)
    )
    assert decision.promote
    assert decision.untested == ("older:rare",)
    assert "older:rare" in decision.reason


def test_a_draft_that_accepts_more_but_costs_more_is_rejected() -> None:
    costs = Costs(4, 0.010, 0.001, 0.006)
    decision = judge(group("changed:german", gain=0.1, changed=True), costs=costs)
    assert not decision.promote
    assert "slower" in decision.reason
    seconds = decision.seconds_per_token
    assert seconds["changed_parent"] == pytest.approx(0.014 / ((1 - 0.5**5) / 0.5), rel=0.1)
    assert seconds["changed_candidate"] > seconds["changed_parent"]


def test_a_costlier_draft_must_pay_on_the_old_traffic_too() -> None:
    costs = Costs(4, 0.010, 0.001, 0.003)
    changed = group("changed:german", gain=0.35, changed=True, requests=50)
    assert judge(changed, costs=costs).promote
    decision = judge(changed, group("older:code", gain=0.0, requests=400), costs=costs)
    assert not decision.promote
    assert "slower on all traffic" in decision.reason


def test_identical_drafts_are_not_promoted() -> None:
    scores = group("changed:german", gain=0.0, changed=True)
    same = GroupScores("changed:german", True, scores.parent, scores.parent, 10, 2.0, 2.0)
    assert not judge(same).promote


def test_without_changed_traffic_there_is_no_decision() -> None:
    with pytest.raises(ValueError, match="changed traffic"):
        judge(group("older:code", gain=0.0))


def test_unpaired_scores_are_refused() -> None:
    with pytest.raises(ValueError, match="pairs are needed"):
        GroupScores("older:code", False, [0.5, 0.4], [0.5], 10, 2.0, 2.0)


def test_wrong_promotions_keep_the_stated_level() -> None:
    """Whatever the number of groups: a true loss just above the bound passes at most 5% of the time."""
    generator = np.random.default_rng(7)
    promoted = 0
    runs = 1_000
    for _ in range(runs):
        groups = []
        for number in range(5):
            loss = 0.0201 if number == 4 else -0.1
            parent = generator.beta(6, 6, 60)
            candidate = parent - loss + generator.normal(0, 0.06, 60)
            groups.append(
                GroupScores(f"{number}", number == 0, parent.tolist(), candidate.tolist(), 60, 2.0, 2.1)
            )
        promoted += decide(groups, SAME_COST, RULES).promote
    # 1.5 standard errors above 5%: the level itself must hold, not just roughly
    assert promoted / runs <= 0.05 + 1.5 * (0.05 * 0.95 / runs) ** 0.5
    assert promoted > 0
