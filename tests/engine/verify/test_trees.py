"""Trees of draft tokens keep the target's distribution by both rules; known mistakes do not."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from driftguard_engine.kernels.reference import tree as reference
from driftguard_engine.kernels.reference.sampling import SamplingBatch
from driftguard_engine.kernels.reference.tree import Noise, TreeRule
from driftguard_engine.speculation import ReferenceVerification, TreeVerification, VerifiedTree
from torch import Tensor

from tests.engine.verify.distributions import (
    Distribution,
    Scenario,
    assert_distribution,
    distribution_of,
    runs_of,
    scenario,
    tables_of,
)

pytestmark = pytest.mark.slow

ROWS = 20_000
Shape = tuple[Any, ...]  # of a node: those of its children
DEEP: Shape = ((((), ()), ()), (((),),), ())  # three children of the root; the deepest nodes are of depth 3
CASE = scenario(5, 3, seed=31)
CASE = replace(CASE, target=CASE.target[:1].expand(4, -1, -1))
GUESSES = (3, 1)  # behind what is drawn, as further children of the root
RULES: tuple[TreeRule, ...] = ("rejection", "sampling")


def law_of(case: Scenario, shape: Shape, rule: TreeRule, guesses: tuple[int, ...] = ()) -> Distribution:
    """P(emitted tokens) by every ordered draw of every node's children; children of guesses are not drawn."""
    p_of, q_of = tables_of(case)

    @cache
    def below(before: int, shape: Shape, depth: int) -> Distribution:
        found: dict[tuple[int, ...], float] = defaultdict(float)
        guessed = guesses if depth == 0 else ()
        q = q_of[depth][before] if shape else []
        there = [token for token, mass in enumerate(q) if mass]  # fewer than are asked for, with a cut
        for drawn in itertools.permutations(there, min(len(shape), len(there))):
            chance, left = 1.0, list(q)
            for token in drawn:
                chance *= left[token] / sum(left)
                left[token] = 0.0
            p, q_left = list(p_of[depth][before]), list(q)
            if rule == "rejection":
                for token, child in zip(drawn, shape, strict=False):
                    passes = min(1.0, p[token] / q_left[token])
                    for run, mass in below(token, child, depth + 1).items():
                        found[token, *run] += chance * passes * mass
                    chance *= 1 - passes
                    p = [max(a - b, 0.0) for a, b in zip(p, q_left, strict=True)]
                    q_left[token] = 0.0
                    p, q_left = ([each / (sum(law) or 1) for each in law] for law in (p, q_left))
                    if not sum(p):
                        break
            for token, mass in enumerate(p):
                if rule == "sampling" and token in drawn:
                    for run, rest in below(token, shape[drawn.index(token)], depth + 1).items():
                        found[token, *run] += chance * mass * rest
                elif token in guessed:
                    for last, rest in enumerate(p_of[depth + 1][token]):
                        found[token, last] += chance * mass * rest
                else:
                    found[token,] += chance * mass
        return found

    total = sum(below(0, shape, 0).values())
    assert total == pytest.approx(1)
    return below(0, shape, 0)


def plant(
    tree: TreeVerification, case: Scenario, shape: Shape, before: Tensor, guesses: tuple[int, ...] = ()
) -> None:
    """Draws the whole tree, node by node."""
    nodes = [(-1, before, shape, 0)]
    for parent, token, children, depth in nodes:
        if children:
            logits = case.draft[depth % case.drafted, token.clamp(min=0)]
            columns = tree.draw(logits, [parent], [len(children)])
            for column, child in zip(columns, children, strict=True):
                nodes.append((column, tree.tokens[:, column], child, depth + 1))
    if guesses:
        tree.guess(torch.tensor([guesses]).expand(len(before), -1), [-1] * len(guesses))


def verified(
    case: Scenario,
    shape: Shape,
    seed: Tensor,
    position: Tensor,
    before: Tensor,
    rule: TreeRule = "rejection",
    guesses: tuple[int, ...] = (),
) -> VerifiedTree:
    rows = len(seed)
    ones = torch.ones(rows)
    sampling = SamplingBatch.of(case.temperature * ones, (case.top_k * ones).long(), case.top_p * ones, seed)
    drafted = torch.full((rows,), 3, dtype=torch.int32)
    tree = TreeVerification(sampling, position.numpy(), drafted, np.full(rows, 99), case.size, rule)
    plant(tree, case, shape, before, guesses)
    inputs = tree.inputs(before)
    return tree.verify(case.target[0, inputs.token_ids])


def assert_lossless(case: Scenario, shape: Shape, rule: TreeRule, guesses: tuple[int, ...] = ()) -> None:
    """The joint distribution of how many are accepted and of the tokens; seed and rows are fixed."""
    rows = torch.arange(ROWS)
    before = torch.zeros(ROWS, dtype=torch.int64)
    found = verified(case, shape, rows // 2, 7 + rows % 2 * 50, before, rule, guesses)
    runs = runs_of(found.tokens)
    assert torch.equal((found.tokens >= 0).sum(1), found.accepted + 1)
    counts = {tuple(token for token in run if token >= 0): count for run, count in runs.items()}
    assert_distribution(counts, law_of(case, shape, rule, guesses), f"{rule}, {shape}")


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize(
    "shaping", [{}, {"temperature": 0.7, "top_k": 3}, {"temperature": 1.3, "top_p": 0.8}]
)
def test_a_step_has_the_enumerated_law(rule: TreeRule, shaping: dict[str, Any]) -> None:
    assert_lossless(replace(CASE, **shaping), DEEP, rule)


def test_guesses_behind_draws_are_accepted_where_the_target_draws_them() -> None:
    assert_lossless(CASE, ((), ()), "rejection", GUESSES)


def test_the_first_token_has_the_targets_law_in_every_enumeration() -> None:
    for rule, shape in itertools.product(RULES, [(), ((),), DEEP]):
        first: dict[int, float] = defaultdict(float)
        for run, mass in law_of(CASE, shape, rule).items():
            first[run[0]] += mass
        expected = distribution_of(CASE.target[0, 0].tolist(), 1.0, 0, 1.0)
        assert [first[token] for token in range(CASE.size)] == pytest.approx(expected)
    accepted = {
        rule: sum((len(run) - 1) * mass for run, mass in law_of(CASE, DEEP, rule).items()) for rule in RULES
    }
    assert accepted["rejection"] > 1.05 * accepted["sampling"], accepted


def several_steps(rule: TreeRule = "rejection") -> None:
    """Steps one after another until all rows have three tokens: noise that a step has used must not be used
    by the next."""
    case, wanted, rows = scenario(3, 1, seed=33), 3, 15_000
    seed, last = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    position, out = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows, wanted + 3, dtype=torch.int64)
    shape: Shape = (((), ()), ((),))
    while bool((position < wanted).any()):
        found = verified(case, shape, seed, position, last, rule)
        going = position < wanted
        for step in range(found.tokens.shape[1]):
            new = going & (step <= found.accepted) & (position + step < out.shape[1])
            out[new, position[new] + step] = found.tokens[new, step]
        ends = found.tokens.gather(1, found.accepted[:, None])[:, 0]
        last, position = torch.where(going, ends, last), position + (found.accepted + 1) * going
    p = tables_of(case)[0][0]
    law: Distribution = {(): 1.0}
    for _ in range(wanted):
        law = {(*run, t): mass * p[run[-1] if run else 0][t] for run, mass in law.items() for t in range(3)}
    assert_distribution(runs_of(out[:, :wanted]), law, "several steps")


@pytest.mark.parametrize("rule", RULES)
def test_several_steps_have_the_targets_law(rule: TreeRule) -> None:
    several_steps(rule)


def test_a_chain_as_a_tree_emits_what_the_token_rule_does() -> None:
    rows = 2_000
    seed, before = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    position = torch.full((rows,), 5)
    found = verified(CASE, (((((),),),)), seed, position, before)
    sampling = SamplingBatch.of(torch.ones(rows), torch.zeros(rows).long(), torch.ones(rows), seed)
    drafted = torch.full((rows,), 3, dtype=torch.int32)
    chain = ReferenceVerification(sampling, position.numpy(), drafted, 3, CASE.size)
    logits, token = [CASE.target[0, before]], before
    for step in range(3):
        chain.draft_logits[:, step] = CASE.draft[step, token]
        chain.draw(step)
        token = chain.draft_tokens[:, step]
        logits.append(CASE.target[step + 1, token])
    assert torch.equal(chain.verify(torch.stack(logits, 1)).tokens, found.tokens)


def test_greedy_rows_descend_by_the_likeliest_token_and_draw_the_likeliest_children() -> None:
    case = replace(CASE, temperature=0.0)
    before = torch.arange(5)
    found = verified(case, DEEP, torch.arange(5), torch.full((5,), 3), before)
    for row in range(5):
        at, shape, expected = row, DEEP, []
        for depth in range(4):
            best = int(case.target[depth, at].argmax())
            expected.append(best)
            order = case.draft[depth, at].argsort(descending=True).tolist()[: len(shape)] if shape else []
            if best not in order:
                break
            shape = shape[order.index(best)]
            at = best
        assert found.tokens[row, : len(expected)].tolist() == expected
        assert found.accepted[row] == len(expected) - 1


def test_a_row_is_the_same_beside_any_others() -> None:
    seed, position, before = torch.arange(40), torch.arange(40) + 3, torch.arange(40) % 5
    together = verified(CASE, DEEP, seed, position, before)
    for row in (0, 7, 39):
        alone = verified(CASE, DEEP, seed[[row]], position[[row]], before[[row]])
        assert torch.equal(alone.tokens[0], together.tokens[row])


def test_rows_have_the_nodes_that_their_depth_and_room_allow() -> None:
    sampling = SamplingBatch.of(torch.ones(3), torch.zeros(3).long(), torch.ones(3), torch.arange(3))
    drafted = torch.tensor([3, 1, 3], dtype=torch.int32)
    tree = TreeVerification(sampling, np.full(3, 4), drafted, np.array([9, 9, 2]), 6)
    first = tree.draw(torch.zeros(3, 6), [-1], [2])
    tree.guess(torch.tensor([[5, 6], [5, 5], [5, 5]]), [first[0], 2])  # there is no token 6
    tree.probe(torch.tensor([[1, 2]] * 3), [-1, 4])
    inputs = tree.inputs(torch.tensor([7, 8, 9]))
    assert inputs.parents == [(-1, 0, 0, 1, 0, 4), (-1, 0, 0, 0, 3), (-1, 0, 0)]
    assert drafted.tolist() == [2, 1, 1]
    for parents, message in (([0], "by another law"), ([first[1], 2], "one depth"), ([-1], "by another law")):
        if parents == [0]:
            tree.draw(torch.zeros(3, 6), [0], [1])
        with pytest.raises(ValueError, match=message):
            tree.draw(torch.zeros(3, 6), parents, [1] * len(parents))
    with pytest.raises(ValueError, match="before it"):
        tree.guess(torch.tensor([[1]] * 3), [99])
    with pytest.raises(ValueError, match="no probe"):
        tree.guess(torch.tensor([[1]] * 3), [4])


def test_logits_without_a_distribution_fail_their_own_row_alone() -> None:
    sampling = SamplingBatch.of(torch.ones(3), torch.zeros(3).long(), torch.ones(3), torch.arange(3))
    tree = TreeVerification(sampling, np.full(3, 4), torch.full((3,), 1, dtype=torch.int32), np.full(3, 9), 4)
    draft, target = torch.zeros(3, 4), torch.zeros(3, 3, 4)
    draft[0], target[1, 0] = torch.nan, torch.nan
    tree.draw(draft, [-1], [2])
    tree.inputs(torch.zeros(3, dtype=torch.int64))
    found = tree.verify(target)
    assert (tree.tokens[0] == -1).all()
    assert found.status.tolist() == [0, 1, 0]
    assert found.accepted[1] == -1
    assert (found.tokens[1] == -1).all()


def children_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = reference.draw_siblings

    def reversed_draw(*given: Any) -> Any:
        tokens, law = draw(*given)
        return tokens[:, ::-1].copy(), law

    monkeypatch.setattr(reference, "draw_siblings", reversed_draw)


def residual_not_normalised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reference, "_normalised", lambda mass, _otherwise: mass)


def q_taken_after_the_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = reference.draw_siblings

    def raised(*given: Any) -> Any:
        tokens, law = draw(*given)
        law[np.arange(len(law)), tokens[:, 0]] += 0.2
        return tokens, law / law.sum(-1, keepdims=True)

    monkeypatch.setattr(reference, "draw_siblings", raised)


def drawn_with_replacement(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = reference.draw_siblings

    def again(logits: Any, count: int, depth: int, sampling: Any, noise: Any) -> Any:
        each = [draw(logits, 1, depth + 100 * sibling, sampling, noise) for sibling in range(count)]
        return np.concatenate([tokens for tokens, _ in each], 1), each[0][1]

    monkeypatch.setattr(reference, "draw_siblings", again)


def siblings_share_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    words = Noise.words
    monkeypatch.setattr(
        Noise, "words", lambda self, rows, depth, purpose, _sibling=0: words(self, rows, depth, purpose)
    )


def steps_share_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    words = Noise.words

    def of_depth(self: Noise, rows: Any, depth: int, purpose: int, sibling: int = 0) -> Any:
        own = replace(self, position=np.zeros_like(self.position))
        return words(own, rows, depth, purpose, sibling)

    monkeypatch.setattr(Noise, "words", of_depth)


@pytest.mark.parametrize(
    "mistake",
    [
        children_in_another_order,
        residual_not_normalised,
        q_taken_after_the_draw,
        drawn_with_replacement,
        siblings_share_noise,
    ],
)
def test_a_mistake_is_caught(
    mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    with pytest.raises(AssertionError, match=r"chi-square|rules out"):
        assert_lossless(CASE, DEEP, "rejection")


def test_steps_that_share_noise_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    steps_share_noise(monkeypatch)
    with pytest.raises(AssertionError, match="chi-square"):
        several_steps()
