"""A row's result is bitwise the same alone, in any batch, at any place, beside any other settings."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from driftguard_engine.kernels.reference.distribution import token_distributions
from driftguard_engine.kernels.reference.sampling import SamplingBatch
from driftguard_engine.kernels.reference.verify import Rule
from driftguard_engine.verify import VerifyResult, verify_chain
from torch import Tensor

from tests.engine.verify.distributions import sample_draft

SIZES = [2, 5, 37, 1001, 2048, 4096, 4097, 9001]
# Cycled over the rows: unfiltered rows among filtered ones, greedy among stochastic, dense ties among none.
TEMPERATURES = [1.0, 0.0, 0.7, 1.0, 2.5]
TOP_KS = [0, 3, 0, 50, 0, 1, 0]
TOP_PS = [1.0, 1.0, 0.9, 1.0, 0.3, 1.0]
LAW = ["scale", "peak", "normaliser", "cut", "cut_token", "tile_mass"]


@dataclass(frozen=True)
class Batch:
    arguments: tuple[Tensor, ...]

    def rows(self, index: Tensor) -> Batch:
        return Batch(tuple(argument[index] for argument in self.arguments))

    def verify(self, rule: Rule = "token") -> VerifyResult:
        return verify_chain(*self.arguments, rule=rule)  # type: ignore[arg-type, misc]


def cycle(values: list[float] | list[int], rows: int) -> Tensor:
    return torch.tensor([values[row % len(values)] for row in range(rows)])


def batch(rows: int, drafted: int, size: int, dtype: torch.dtype = torch.float32) -> Batch:
    random = torch.Generator().manual_seed(rows * 1000 + size)
    target = 2 * torch.randn(rows, drafted + 1, size, generator=random)
    target[1::4] = target[1::4].round()  # many equal logits
    target = target.to(dtype)
    draft = (target[:, :-1].float() + 0.3 * torch.randn(rows, drafted, size, generator=random)).to(dtype)
    settings = (cycle(TEMPERATURES, rows), cycle(TOP_KS, rows), cycle(TOP_PS, rows), torch.arange(rows) + 77)
    position = torch.full((rows,), 9)
    tokens = [sample_draft(draft[:, step], *settings, position + step) for step in range(drafted)]
    lengths = torch.arange(rows) % (drafted + 1)
    return Batch((target, draft, torch.stack(tokens, 1), lengths, *settings, position))


def assert_same(one: VerifyResult, other: VerifyResult, context: str) -> None:
    for name in ("tokens", "accepted", "emitted"):
        assert torch.equal(getattr(one, name), getattr(other, name)), f"{name}: {context}"


@pytest.mark.parametrize("rule", ["token", "block"])
@pytest.mark.parametrize("size", SIZES)
def test_alone_and_together(size: int, rule: Rule) -> None:
    rows = 33
    whole = batch(rows, 3, size)
    alone = [whole.rows(torch.tensor([row])).verify(rule) for row in range(rows)]
    random = torch.Generator().manual_seed(size)
    for count in (1, 2, 3, 7, 16, rows):
        index = torch.randperm(rows, generator=random)[:count]
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            together = whole.rows(index).verify(rule)
            for place, row in enumerate(index.tolist()):
                picked = VerifyResult(
                    *(field[[place]] for field in (together.tokens, together.accepted, together.emitted))
                )
                assert_same(
                    picked, alone[row], f"V={size}, row {row} at {place} of {count}, {threads} threads"
                )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", SIZES)
def test_laws_have_the_same_bits_alone_and_together(size: int, dtype: torch.dtype) -> None:
    """Stronger than equal tokens: the numbers that decide them are equal to the last bit."""
    rows = 17
    logits = (2 * torch.randn(rows, 3, size, generator=torch.Generator().manual_seed(size))).to(dtype)
    asked = (cycle([1.0, 0.7, 2.5], rows), cycle(TOP_KS, rows), cycle(TOP_PS, rows), torch.arange(rows))
    sampling = SamplingBatch.of(*asked)
    alone = [
        token_distributions(logits[[row]].float().numpy(), sampling.rows(slice(row, row + 1)))
        for row in range(rows)
    ]
    for count in (2, 3, 8, rows):
        for first in (0, rows - count):
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                index = torch.arange(first, first + count)
                together = token_distributions(logits[index].float().numpy(), sampling.rows(index.numpy()))
                for place, row in enumerate(index.tolist()):
                    context = f"V={size}, row {row} of {first}..{first + count}, {threads} threads"
                    for name in LAW:
                        one, other = getattr(together, name)[place], getattr(alone[row], name)[0]
                        assert np.array_equal(one, other), f"{name}: {context}"


def test_what_other_rows_ask_for_changes_nothing() -> None:
    """Row 0 asks for no filter; beside it everything from nothing to greedy and the tightest filters."""
    size, drafted = 2048, 4
    whole = batch(2, drafted, size)
    rows = [list(argument) for argument in whole.arguments]
    results = []
    for temperature, top_k, top_p in (
        (1.0, 0, 1.0),
        (0.0, 0, 1.0),
        (0.3, 7, 1.0),
        (1.0, 0, 0.2),
        (1.0, 1, 0.01),
    ):
        rows[4][1], rows[5][1], rows[6][1] = (
            torch.tensor(temperature),
            torch.tensor(top_k),
            torch.tensor(top_p),
        )
        results.append(Batch(tuple(torch.stack(values) for values in rows)).verify())
    for result in results[1:]:
        assert torch.equal(result.tokens[0], results[0].tokens[0])


def test_the_layout_of_the_memory_changes_nothing() -> None:
    whole = batch(6, 3, 9001, torch.float64)  # in float64 every addition rounds
    target, draft, *rest = whole.arguments
    padded = torch.nn.functional.pad(target, (0, 7, 0, 2))[:, :4, :9001]  # a view into something larger
    turned = draft.permute(2, 0, 1).contiguous().permute(1, 2, 0)  # vocabulary outermost in memory
    assert_same(Batch((padded, turned, *rest)).verify(), whole.verify(), "layouts")
    none = torch.zeros(6, dtype=torch.int64)
    sampling = SamplingBatch.of(torch.ones(6), none, torch.ones(6), none)
    one, other = (
        token_distributions(logits.float().numpy(), sampling).normaliser for logits in (turned, draft)
    )
    assert np.array_equal(one, other)


@pytest.mark.parametrize("rule", ["token", "block"])
def test_unread_rows_may_hold_anything(rule: Rule) -> None:
    whole = batch(12, 3, 50)
    target, draft, tokens, lengths = (argument.clone() for argument in whole.arguments[:4])
    step = torch.arange(3)
    beyond = step >= lengths.unsqueeze(1)
    target[:, 1:][beyond] = torch.nan
    draft[beyond] = torch.inf
    tokens[beyond] = 10**15
    dirty = Batch((target, draft, tokens, lengths, *whole.arguments[4:]))
    assert_same(dirty.verify(rule), whole.verify(rule), "rows beyond each length overwritten")


def test_greedy_rows_have_one_rule() -> None:
    whole = batch(20, 3, 500)
    greedy = whole.rows((whole.arguments[4] == 0).nonzero().squeeze(1))
    assert_same(greedy.verify("block"), greedy.verify("token"), "greedy")
    assert not torch.equal(whole.verify("block").tokens, whole.verify("token").tokens)


def test_same_seed_same_tokens_and_another_seed_others() -> None:
    whole = batch(8, 3, 500)
    *front, seed, position = whole.arguments
    assert_same(whole.verify(), whole.verify(), "called twice")
    assert not torch.equal(Batch((*front, seed + 1, position)).verify().tokens, whole.verify().tokens)
    assert not torch.equal(Batch((*front, seed, position + 100)).verify().tokens, whole.verify().tokens)


@np.errstate(invalid="ignore", divide="ignore")
def test_a_row_without_a_law_leaves_the_law_of_another_alone() -> None:
    few = np.full((1, 1, 50), -np.inf, np.float32)  # fewer tokens than top-k lets stay
    few[..., [3, 20, 41]] = [0.5, 2.0, -1.0]
    beside = np.concatenate([few, np.full_like(few, np.nan)])
    alone = token_distributions(
        few, SamplingBatch(np.ones(1), np.array([5]), np.ones(1), np.zeros(1, np.int64))
    )
    both = token_distributions(
        beside, SamplingBatch(np.ones(2), np.array([5, 5]), np.ones(2), np.zeros(2, np.int64))
    )
    for name in LAW:
        assert np.array_equal(getattr(both, name)[:1], getattr(alone, name)), name
