"""The known mistakes of speculative engines, planted on purpose: `distributions` catches all of them."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import get_args

import pytest
import torch
from driftguard_engine.kernels.reference.verify import Rule
from torch import Tensor

from tests.engine.verify.broken import (
    BlockMistake,
    Mistake,
    PlainBlockVerifier,
    PlainVerifier,
    argmax_sampler,
    gumbel_sampler,
)
from tests.engine.verify.distributions import (
    BY_RULE,
    Sampler,
    Scenario,
    assert_lossless,
    assert_precise,
    draw,
    sample_draft,
    scenario,
)
from tests.engine.verify.engine_distributions import probabilities

pytestmark = pytest.mark.slow

ROWS = 200_000
SEED = 20270
MISTAKES = [mistake for mistake in get_args(Mistake) if mistake != "none"]
BLOCK_MISTAKES = [mistake for mistake in get_args(BlockMistake) if mistake != "none"]


CASES = {
    # p = (.45, .55) under q = (.9, .1): 0.9% of all rows move from one cell to another. At 600,000 rows
    # the statistic is expected at 220 on 4 degrees of freedom, with a spread of 30; 24 fails.
    "acceptance x 1.02": Scenario(
        torch.tensor([0.45, 0.55]).log().expand(2, 2, 2), torch.tensor([0.9, 0.1]).log().expand(1, 2, 2)
    ),
    "q before top-k, p after": scenario(6, 2, seed=21, top_k=3),
    "block": scenario(5, 3, seed=22),
    "any other": scenario(5, 2, seed=22),
}


def sampler_for(mistake: Mistake) -> Sampler:
    return gumbel_sampler if mistake == "residual shares the draft's gumbel noise" else sample_draft


@cache
def assert_the_engine_passes(case: str, sampler: Sampler, rows: int, rule: Rule = "token") -> None:
    """Once for all mistakes that are planted into the same draws."""
    assert_lossless(CASES[case], rows=rows, seed=SEED, sample=sampler, rule=rule)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_checker_catches(mistake: Mistake) -> None:
    name, sampler = mistake if mistake in CASES else "any other", sampler_for(mistake)
    rows = 600_000 if mistake == "acceptance x 1.02" else ROWS
    # The same case, sampler, rows and seed pass with the engine's verifier, so it is the mistake that fails.
    assert_the_engine_passes(name, sampler, rows)
    with pytest.raises(AssertionError, match=r"chi-square|rules out"):
        assert_lossless(CASES[name], rows=rows, seed=SEED, verify=PlainVerifier(mistake), sample=sampler)


@pytest.mark.parametrize("mistake", BLOCK_MISTAKES)
def test_checker_catches_in_the_block_rule(mistake: BlockMistake) -> None:
    assert_the_engine_passes("block", BY_RULE["block"][1], ROWS, "block")
    verify = PlainBlockVerifier(mistake)
    with pytest.raises(AssertionError, match=r"chi-square|rules out"):
        assert_lossless(CASES["block"], rows=ROWS, seed=SEED, rule="block", verify=verify)


def test_checker_catches_a_greedy_draft_with_a_soft_q() -> None:
    with pytest.raises(AssertionError, match=r"chi-square|rules out"):
        assert_lossless(scenario(5, 2, seed=22), rows=ROWS, seed=SEED, sample=argmax_sampler)


def test_probabilities_in_bfloat16_are_caught_and_the_engines_are_exact() -> None:
    def rounded(logits: Tensor, temperature: float) -> Tensor:
        return probabilities(logits, temperature).bfloat16()

    assert_precise(probabilities, seed=SEED)
    with pytest.raises(AssertionError, match="relative error"):
        assert_precise(rounded, seed=SEED)


@pytest.mark.parametrize("rule", BY_RULE)
@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (4, 1.0), (0, 0.83), (5, 0.83)])
def test_plain_verifier_without_a_mistake_emits_the_same_tokens(
    temperature: float, top_k: int, top_p: float, rule: Rule
) -> None:
    case = replace(scenario(9, 3, seed=23), temperature=temperature, top_k=top_k, top_p=top_p)
    seed, position = torch.arange(20_000), torch.full((20_000,), 5)
    verify, sample = BY_RULE[rule]
    engine = draw(case, 20_000, seed, position, verify=verify, sample=sample)
    alike = PlainVerifier() if rule == "token" else PlainBlockVerifier()
    plain = draw(case, 20_000, seed, position, verify=alike, sample=sample)
    assert torch.equal(engine.tokens, plain.tokens)
    assert torch.equal(engine.accepted, plain.accepted)
