"""What adaptive K gives on servers whose truth is known: near the best fixed K, and not below none."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from driftguard_engine.adaptive_k.plan import REASONS, DraftingRow, FixedK, Given
from driftguard_engine.adaptive_k.policy import AdaptiveK

from tests.engine.adaptive_k.simulated import Seconds, Server, best_fixed, rate_of_fixed, seconds_of

LARGEST = 8
SEED = 3
MEMORY_BOUND = seconds_of(plain=10, row=0.02, draft=1.0, token=0.02)  # milliseconds
COMPUTE_BOUND = seconds_of(plain=0.3, row=0.5, draft=0.15, token=0.45)
BETWEEN = seconds_of(plain=8, row=0.05, draft=0.8, token=0.25)


def server(seconds: Seconds, acceptance: Sequence[float], **changes: float) -> Server:
    return Server(AdaptiveK(LARGEST), seconds, acceptance, wanted=LARGEST, seed=SEED, **changes)  # type: ignore[arg-type]


@pytest.mark.parametrize("seconds", [MEMORY_BOUND, COMPUTE_BOUND, BETWEEN])
@pytest.mark.parametrize("acceptance", [0.1, 0.4, 0.7, 0.9])
@pytest.mark.parametrize("rows", [1, 8])
def test_it_is_within_a_few_percent_of_the_best_fixed_k(
    seconds: Seconds, acceptance: float, rows: int
) -> None:
    served = server(seconds, [acceptance] * rows)
    served.run(300)
    best, k = best_fixed(seconds, served.acceptance, LARGEST)
    assert served.run(300) > 0.95 * best, (k, served.ks)
    assert sum(served.policy.reasons.values()) == 600 * rows


@pytest.mark.parametrize("rows", [1, 8])
def test_a_poor_draft_is_switched_off_and_costs_no_more_than_the_probes(rows: int) -> None:
    served = server(BETWEEN, [0.05] * rows)
    served.run(300)
    assert served.run(1000) > 0.98 * rate_of_fixed(0, BETWEEN, served.acceptance)
    assert served.policy.reasons["below_break_even"] > 750 * rows
    assert served.policy.reasons["probing"] > 0


@pytest.mark.parametrize("rows", [1, 8])
def test_it_comes_back_when_acceptance_rises(rows: int) -> None:
    served = server(MEMORY_BOUND, [0.02] * rows)
    served.run(1000)
    assert served.counts_of_last(100) == {0}
    served.acceptance = [0.8] * rows
    served.run(1000)
    best, _ = best_fixed(MEMORY_BOUND, served.acceptance, LARGEST)
    assert served.run(200) > 0.95 * best


def test_it_yields_to_concurrency_and_returns() -> None:
    served = server(BETWEEN, [0.7] * 4)
    served.run(300)
    assert served.policy.decision.reason in ("best", "probing")
    served.acceptance = [0.7] * 64
    served.run(300)
    assert served.run(300) > 0.98 * rate_of_fixed(0, BETWEEN, served.acceptance)
    assert served.policy.decision.reason in ("high_concurrency", "probing")
    assert served.policy.reasons["high_concurrency"] > 250 * 64
    assert served.policy.reasons["below_break_even"] == 0
    served.acceptance = [0.7] * 4
    assert served.run(300) > 0.9 * best_fixed(BETWEEN, served.acceptance, LARGEST)[0]


def test_requests_of_one_batch_draft_by_their_own_acceptance() -> None:
    served = server(BETWEEN, [0.9, 0.9, 0.6, 0.6, 0.05, 0.05])
    served.run(300)
    served.drafted.clear()
    served.run(300)
    good, fair, poor = ((served.drafted[at] + served.drafted[at + 1]) / 600 for at in (0, 2, 4))
    assert good > 2.0
    assert good >= fair > poor
    assert poor < good / 4
    assert served.policy.reasons["request_limit"] > 0
    assert served.run(500) > best_fixed(BETWEEN, served.acceptance, LARGEST)[0]


def test_short_answers_in_a_batch_that_changes_size_are_served_as_well() -> None:
    served = server(BETWEEN, [], answer_steps=40)
    served.run_batches([1, 2, 3, 5, 8, 12, 20], acceptances=[0.5, 0.7, 0.8], batches=40)
    share = served.run_batches([1, 2, 3, 5, 8, 12, 20], acceptances=[0.5, 0.7, 0.8], batches=60)
    assert share > 0.95


def test_a_machine_that_gets_slower_and_faster_does_not_mislead_it() -> None:
    served = server(MEMORY_BOUND, [0.7] * 4)
    served.run(300)
    for slowness in (1.7, 1.0, 2.5, 1.0):
        served.slowness = slowness
        best, _ = best_fixed(MEMORY_BOUND, served.acceptance, LARGEST)
        assert served.run(300) > 0.9 * best / slowness


def test_another_draft_is_learned_anew_and_the_old_one_s_requests_do_not_count_for_it() -> None:
    served = server(MEMORY_BOUND, [0.02] * 4)
    served.run(400)
    assert served.policy.decision.num_speculative_tokens == 0
    policy = served.policy
    rows = [DraftingRow("old", "v1", 4), DraftingRow("new", "v2", 4)]
    plan = policy.plan(rows)
    assert (plan.reason, plan.counts) == ("learning", (4, 4))
    drafted = []
    for _ in range(100):
        plan = policy.plan(rows)
        drafted.append(plan.counts[1])
        policy.learned(plan, 0.01 + 0.001 * plan.k, {"old": Given(4, 0), "new": Given(4, plan.counts[1])})
    assert drafted[30:].count(4) > 60


def test_without_times_of_its_own_it_drafts_what_is_wanted() -> None:
    """Where every step also reads a prompt none can be timed."""
    policy = AdaptiveK(LARGEST)
    rows = [DraftingRow("a", "v1", 4), DraftingRow("b", "v1", 2)]
    for _ in range(500):
        plan = policy.plan(rows)
        policy.learned(plan, None, {"a": Given(4, 0), "b": Given(2, 0)})
    assert policy.reasons["learning"] == 1000
    assert plan.counts == (4, 2)


def test_who_may_not_draft_does_not() -> None:
    for policy in (AdaptiveK(LARGEST), FixedK()):
        rows = [DraftingRow("a", "v1", 3), DraftingRow("b", "none", 0)]
        assert policy.plan(rows).counts == (3, 0)
        assert policy.plan(rows[1:]).counts == (0,)
        assert policy.plan([]).counts == ()
        assert set(policy.reasons) <= set(REASONS)


def test_the_next_step_may_be_planned_before_the_last_one_is_told() -> None:
    policy = AdaptiveK(LARGEST)
    rows = [DraftingRow("a", "v1", 4)]
    waiting = [policy.plan(rows)]
    for _ in range(400):
        waiting.append(policy.plan(rows))
        plan = waiting.pop(0)
        policy.learned(plan, 0.01 + 0.0005 * plan.k, {"a": Given(4, plan.counts[0])})
    assert policy.decision.reason in ("best", "probing")
    assert policy.reasons["best"] > 300
    assert waiting[0].k == 4 or waiting[0].reason == "probing"
