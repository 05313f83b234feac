"""The emitted tokens have the target's distribution: exact enumeration against large samples, seeds fixed."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from driftguard_engine.verify import verify_chain

from tests.engine.verify.distributions import (
    Distribution,
    Scenario,
    assert_distribution,
    assert_lossless,
    counts_of,
    distribution_of,
    draw,
    exact_distribution,
    runs_of,
    sample_draft,
    scenario,
)

pytestmark = pytest.mark.slow

ROWS = 200_000

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


@pytest.mark.parametrize("name", CASES)
def test_joint_law_equals_enumeration(name: str) -> None:
    assert_lossless(CASES[name], rows=ROWS, seed=20260)


def test_laws_that_do_not_overlap() -> None:
    case = scenario(6, 2, seed=9)
    target, draft = case.target.clone(), case.draft.clone()
    target[..., :3] = -torch.inf
    draft[..., 3:] = -torch.inf
    disjoint = dataclasses.replace(case, target=target, draft=draft)
    assert_lossless(disjoint, rows=50_000, seed=20261)


def test_point_mass_drafts() -> None:
    """An n-gram proposal: one token per context, certain under q."""
    case = scenario(6, 3, seed=10, top_p=0.9)
    proposal = case.target[:-1].topk(2, dim=-1).indices[..., 1]  # [K, V] the second likeliest
    point = torch.full_like(case.draft, -torch.inf).scatter_(2, proposal.unsqueeze(2), 0.0)
    assert_lossless(dataclasses.replace(case, draft=point), rows=ROWS, seed=20262)


def test_ragged_lengths_and_no_drafts_in_one_batch() -> None:
    case = scenario(5, 3, seed=11, temperature=0.9)
    rows = 4 * 60_000
    lengths = torch.arange(rows) % 4
    result = draw(case, rows, torch.arange(rows), torch.full((rows,), 3), lengths)
    for length in range(4):
        chosen = lengths == length
        part = type(result)(result.tokens[chosen], result.accepted[chosen], result.emitted[chosen])
        assert int(part.accepted.max()) <= length
        assert_distribution(
            counts_of(part), exact_distribution(case, length), f"length {length}, seeds 0..{rows}, position 3"
        )


def test_whole_sequences_follow_the_target() -> None:
    """Step after step with one seed: a position behind a rejection is drafted again, with the same noise."""
    case = scenario(4, 2, seed=12, temperature=0.8)
    stationary = dataclasses.replace(
        case, target=case.target[1:2].expand(3, -1, -1), draft=case.draft[1:2].expand(2, -1, -1)
    )
    rows, wanted = 150_000, 4
    sequences = generate(stationary, rows, wanted)
    assert_distribution(
        runs_of(sequences), chain_distribution(stationary, wanted), f"sequences of {wanted}, seeds 0..{rows}"
    )


def test_greedy_equals_the_targets_own_greedy_run() -> None:
    case = scenario(6, 3, seed=13, temperature=0.0)
    stationary = dataclasses.replace(
        case, target=case.target[1:2].expand(4, -1, -1), draft=case.draft[1:2].expand(3, -1, -1)
    )
    best = stationary.target[0].argmax(-1)
    expected = [0]
    for _ in range(12):
        expected.append(int(best[expected[-1]]))
    assert generate(stationary, 3, 12).tolist() == [expected[1:]] * 3


def generate(case: Scenario, rows: int, wanted: int) -> torch.Tensor:
    """[rows, wanted] tokens after token 0, speculating; row r has seed r."""
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
            token = sample_draft(draft_logits[-1], *settings, position + step)
            tokens.append(token)
            logits.append(case.target[step + 1, token])
        lengths = torch.full((rows,), drafted)
        result = verify_chain(
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
