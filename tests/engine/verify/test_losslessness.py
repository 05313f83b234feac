"""The emitted tokens have the target's distribution: exactly, and in samples with fixed seeds."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import pytest
import torch
from driftguard_engine import speculation
from driftguard_engine.kernels.reference.verify import Rule, StepNoise

from tests.engine.verify.distributions import (
    BY_RULE,
    Distribution,
    Scenario,
    assert_distribution,
    counts_of,
    distribution_of,
    draw,
    exact_distribution,
    runs_of,
    scenario,
    tables_of,
)
from tests.engine.verify.enumeration import Run, chain_step, law_of_steps

pytestmark = pytest.mark.slow

RULES: tuple[Rule, ...] = ("token", "block")

CASES = {
    "temperature 1": scenario(5, 3, seed=1),
    "temperature 0.7": scenario(7, 2, seed=2, temperature=0.7),
    "temperature 1.6": scenario(6, 2, seed=3, temperature=1.6),
    "top-k 3": scenario(8, 2, seed=4, top_k=3),
    "top-p 0.8": scenario(8, 2, seed=5, top_p=0.8),
    "all three": scenario(8, 3, seed=6, temperature=0.8, top_k=5, top_p=0.85),
    "draft equals target": dataclasses.replace(
        scenario(5, 2, seed=7), draft=scenario(5, 2, seed=7).target[:-1]
    ),
    "draft opposes target": dataclasses.replace(
        scenario(5, 2, seed=8), draft=-2 * scenario(5, 2, seed=8).target[:-1]
    ),
}


def disjoint() -> Scenario:
    case = scenario(6, 2, seed=9)
    target, draft = case.target.clone(), case.draft.clone()
    target[..., :3] = -torch.inf
    draft[..., 3:] = -torch.inf
    return dataclasses.replace(case, target=target, draft=draft)


def certain() -> Scenario:
    """As n-gram lookup proposes: one token per context, the second likeliest, certain under q."""
    case = scenario(6, 3, seed=10, top_p=0.9)
    proposal = case.target[:-1].topk(2, dim=-1).indices[..., 1]
    point = torch.full_like(case.draft, -torch.inf).scatter_(2, proposal.unsqueeze(2), 0.0)
    return dataclasses.replace(case, draft=point)


@pytest.mark.parametrize("rule", RULES)
def test_a_step_has_exactly_the_law_worked_out_by_hand(rule: Rule) -> None:
    """Of accepted count and tokens; that the engine's random numbers draw by it is seen below, and where
    mistakes are planted."""
    for name, case in (CASES | {"disjoint": disjoint(), "certain": certain()}).items():
        found = law_of_steps(chain_step(case, rule), 1, rule)
        expected = exact_distribution(case, case.drafted, rule)
        assert {run: found.get((run,), 0.0) for run in expected} == pytest.approx(expected, abs=1e-6), name
        assert sum(found.values()) == pytest.approx(1), name


def three_steps_are_off_by(rule: Rule, *, own_noise: bool = True) -> float:
    """The joint law of accepted counts and tokens of three steps, against that of steps that know of each
    other by the newest token alone. own_noise: as the rule has it."""
    size = 3 if rule == "block" else 2  # of tokens, what a step has not looked at is known to the next
    case = scenario(size, 2, seed=12, temperature=0.8)
    target, draft = case.target[1:2].expand(3, -1, -1), case.draft[1:2].expand(2, -1, -1)
    case = dataclasses.replace(case, target=target, draft=draft)
    found = law_of_steps(chain_step(case, rule), 3, rule if own_noise else None)
    laws = [exact_distribution(behind(case, token), 2, rule) for token in range(case.size)]
    expected: dict[tuple[Run, ...], float] = {(): 1.0}
    for _ in range(3):
        expected = {
            (*runs, run): mass * share
            for runs, mass in expected.items()
            for run, share in laws[runs[-1][-1] if runs else 0].items()
        }
    assert set(found) <= set(expected)
    return max(abs(found.get(runs, 0.0) - mass) for runs, mass in expected.items())


def behind(case: Scenario, token: int) -> Scenario:
    """The same behind this token, where the first step's laws are those of token 0."""
    target, draft = case.target.clone(), case.draft.clone()
    target[0, 0], draft[0, 0] = case.target[0, token], case.draft[0, token]
    return dataclasses.replace(case, target=target, draft=draft)


@pytest.mark.parametrize("rule", RULES)
def test_three_steps_have_exactly_the_joint_law(rule: Rule) -> None:
    """Also where a step draws by numbers that the step before had not looked at."""
    assert three_steps_are_off_by(rule) < 1e-6


def test_the_block_rule_needs_noise_of_its_own_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the token rule positions behind a rejection were not looked at; by the block rule they were."""

    def by_position(seed: Any, position: Any, steps: int, rule: Rule) -> StepNoise:
        return StepNoise(seed, position, steps)

    monkeypatch.setattr(speculation, "StepNoise", by_position)
    assert three_steps_are_off_by("block", own_noise=False) > 1e-3


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", CASES)
def test_the_enumerated_law_is_the_targets(name: str, rule: Rule) -> None:
    """Exactly: what is emitted, gone on by the target's own draws, has the target's law to the last token."""
    case = CASES[name]
    p, _ = tables_of(case)
    for length in range(case.drafted + 1):
        law = exact_distribution(case, length, rule)
        for run in itertools.product(range(case.size), repeat=length + 1):
            steps = list(zip((0, *run), run, strict=False))
            own = [p[step][before][token] for step, (before, token) in enumerate(steps)]
            found = math.fsum(law[run[:end]] * math.prod(own[end:]) for end in range(1, length + 2))
            assert math.isclose(found, math.prod(own), rel_tol=1e-9, abs_tol=1e-12), (length, run)


def accepted_by(case: Scenario, rule: Rule) -> float:
    """Expected accepted drafts of a step."""
    law = exact_distribution(case, case.drafted, rule)
    return math.fsum((len(run) - 1) * chance for run, chance in law.items())


def test_the_block_rule_accepts_the_first_token_as_often_at_any_length_and_more_later() -> None:
    for name, case in CASES.items():
        first = {
            1 - math.fsum(law[(token,)] for token in range(case.size))
            for rule in RULES
            for length in range(1, case.drafted + 1)
            for law in [exact_distribution(case, length, rule)]
        }
        assert max(first) - min(first) < 1e-12, name
        assert accepted_by(case, "block") >= accepted_by(case, "token") - 1e-12, name
    # The example of Sun et al.: p = (1/3, 2/3), q = (2/3, 1/3), whatever came before.
    law = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64).log()
    example = Scenario(law.expand(3, 2, 2), law.flip(0).expand(2, 2, 2))
    assert accepted_by(example, "token") == pytest.approx(10 / 9)
    assert accepted_by(example, "block") == pytest.approx(11 / 9)


def test_of_point_masses_both_rules_are_the_same() -> None:
    laws = [exact_distribution(certain(), 3, rule) for rule in RULES]
    assert laws[0] == pytest.approx(laws[1], abs=1e-12)


@pytest.mark.parametrize("rule", RULES)
def test_ragged_lengths_and_no_drafts_in_one_batch(rule: Rule) -> None:
    case = scenario(5, 3, seed=11, temperature=0.9)
    rows = 4 * 20_000
    lengths = torch.arange(rows) % 4
    result = draw(case, rows, torch.arange(rows), torch.full((rows,), 3), lengths, *BY_RULE[rule])
    for length in range(4):
        chosen = lengths == length
        part = type(result)(result.tokens[chosen], result.accepted[chosen], result.emitted[chosen])
        assert int(part.accepted.max()) <= length
        assert_distribution(
            counts_of(part),
            exact_distribution(case, length, rule),
            f"length {length}, seeds 0..{rows}, position 3",
        )


def assert_sequences_follow_the_target(rule: Rule) -> None:
    case = scenario(4, 2, seed=12, temperature=0.8)
    stationary = dataclasses.replace(
        case, target=case.target[1:2].expand(3, -1, -1), draft=case.draft[1:2].expand(2, -1, -1)
    )
    rows, wanted = 50_000, 5  # two steps at least, and up to five
    sequences = generate(stationary, rows, wanted, rule)
    assert_distribution(
        runs_of(sequences), chain_distribution(stationary, wanted), f"sequences of {wanted}, seeds 0..{rows}"
    )


@pytest.mark.parametrize("rule", RULES)
def test_whole_sequences_follow_the_target(rule: Rule) -> None:
    """Step after step with one seed: a position behind a rejection is drafted again."""
    assert_sequences_follow_the_target(rule)


@pytest.mark.parametrize("rule", RULES)
def test_greedy_equals_the_targets_own_greedy_run(rule: Rule) -> None:
    case = scenario(6, 3, seed=13, temperature=0.0)
    stationary = dataclasses.replace(
        case, target=case.target[1:2].expand(4, -1, -1), draft=case.draft[1:2].expand(3, -1, -1)
    )
    best = stationary.target[0].argmax(-1)
    expected = [0]
    for _ in range(12):
        expected.append(int(best[expected[-1]]))
    assert generate(stationary, 3, 12, rule).tolist() == [expected[1:]] * 3


def generate(case: Scenario, rows: int, wanted: int, rule: Rule) -> torch.Tensor:
    """[rows, wanted] tokens after token 0, speculating; row r has seed r."""
    verify, sample = BY_RULE[rule]
    settings = (
        torch.full((rows,), case.temperature),
        torch.full((rows,), case.top_k),
        torch.full((rows,), case.top_p),
        torch.arange(rows),
    )
    drafted = case.drafted
    out = torch.zeros(rows, wanted + drafted + 1, dtype=torch.int64)
    position = torch.zeros(rows, dtype=torch.int64)  # tokens emitted so far
    last = torch.zeros(rows, dtype=torch.int64)
    while bool((position < wanted).any()):
        token, tokens, logits = last, [], [case.target[0, last]]
        draft_logits = []
        for step in range(drafted):
            draft_logits.append(case.draft[step, token])
            token = sample(draft_logits[-1], *settings, position, step)
            tokens.append(token)
            logits.append(case.target[step + 1, token])
        lengths = torch.full((rows,), drafted)
        result = verify(
            torch.stack(logits, 1),
            torch.stack(draft_logits, 1),
            torch.stack(tokens, 1),
            lengths,
            *settings,
            position,
        )
        going = position < wanted
        for step in range(drafted + 1):
            new = going & (step < result.emitted)
            out[new, position[new] + step] = result.tokens[new, step]
        last = result.tokens.gather(1, result.accepted.unsqueeze(1)).squeeze(1).where(going, last)
        position = position + result.emitted * going
    return out[:, :wanted]


def chain_distribution(case: Scenario, wanted: int) -> Distribution:
    p = [distribution_of(row.tolist(), case.temperature, case.top_k, case.top_p) for row in case.target[0]]
    distribution: Distribution = {(): 1.0}
    for _ in range(wanted):
        distribution = {
            (*run, token): chance * p[run[-1] if run else 0][token]
            for run, chance in distribution.items()
            for token in range(case.size)
        }
    return distribution
