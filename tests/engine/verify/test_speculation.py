"""The verification of a step keeps what its drafts were drawn from, and emits what the same logits give."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from driftguard_engine.kernels.tensor_checks import InvalidLogits, checked_sampling
from driftguard_engine.speculation import Verification, Verified
from driftguard_engine.verify import VerifyResult, verification_of, verify_chain
from scipy import stats
from torch import Tensor

from tests.engine.verify.distributions import sample_draft

CPU = torch.device("cpu")
ROWS, DRAFTS, SIZE = 9, 3, 4099  # three tiles
TEMPERATURE = torch.tensor([1.0, 0.0, 0.7, 1.0, 2.5, 0.0, 1.0, 1.3, 1.0])
TOP_K = torch.tensor([0, 3, 0, 50, 0, 0, 1, 0, 0])
TOP_P = torch.tensor([1.0, 1.0, 0.9, 1.0, 0.3, 1.0, 1.0, 1.0, 1.0])
SEED, POSITION = torch.arange(ROWS) + 5, torch.arange(ROWS) + 40
LENGTHS = torch.arange(ROWS) % (DRAFTS + 1)
SETTINGS = (TEMPERATURE, TOP_K, TOP_P, SEED)


def new_step(drafted: Tensor = LENGTHS) -> Verification:
    sampling = checked_sampling(*SETTINGS, ROWS, CPU)
    return verification_of(sampling, POSITION.numpy(), drafted.int(), DRAFTS, SIZE, torch.float32)


def new_logits() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(21)
    target = 2 * torch.randn(ROWS, DRAFTS + 1, SIZE, generator=random)
    return target, target[:, :-1] + 0.6 * torch.randn(ROWS, DRAFTS, SIZE, generator=random)


def draw_all(step: Verification, draft: Tensor) -> None:
    step.draft_logits.copy_(draft)
    for drawn in range(draft.shape[1]):
        step.draw(drawn)


def assert_verified(found: Verified, known: VerifyResult) -> None:
    steps = found.tokens.shape[1]
    assert torch.equal(found.tokens, known.tokens[:, :steps])
    assert (known.tokens[:, steps:] == -1).all()
    assert torch.equal(found.accepted, known.accepted)
    assert not found.status.any()


def test_a_step_emits_what_its_logits_give() -> None:
    step, (target, draft) = new_step(), new_logits()
    draw_all(step, draft)
    for row, tokens in enumerate(step.draft_tokens.tolist()):
        one = slice(row, row + 1)
        asked = (TEMPERATURE[one], TOP_K[one], TOP_P[one], SEED[one])
        length = int(LENGTHS[row])
        assert tokens[:length] == [
            int(sample_draft(draft[one, drawn], *asked, POSITION[one] + drawn)) for drawn in range(length)
        ]
    known = verify_chain(target, draft, step.draft_tokens, LENGTHS, *SETTINGS, POSITION)
    assert 0 < int(known.accepted.sum()) < int(LENGTHS.sum())
    assert_verified(step.verify(target), known)


def test_no_more_is_verified_than_the_target_has_read() -> None:
    lengths = LENGTHS.clamp(max=1)
    step, (target, draft) = new_step(lengths), new_logits()
    draw_all(step, draft)
    known = verify_chain(target, draft, step.draft_tokens, lengths, *SETTINGS, POSITION)
    assert_verified(step.verify(target[:, :2]), known)


def test_a_guess_is_certain() -> None:
    step, (target, _) = new_step(), new_logits()
    likeliest = target[:, :-1].argmax(-1)
    point = torch.full((ROWS, DRAFTS, SIZE), -torch.inf).scatter(-1, likeliest.unsqueeze(-1), 0.0)
    step.draft_tokens.copy_(likeliest)
    known = verify_chain(target, point, likeliest, LENGTHS, *SETTINGS, POSITION)
    assert 0 < int(known.accepted.sum()) < int(LENGTHS.sum())
    assert_verified(step.verify(target), known)


def test_rows_are_guessed_beside_rows_that_are_drawn() -> None:
    step, alone, (target, draft) = new_step(), new_step(), new_logits()
    guessed = [1, 2, 6, 7]
    guesses = target[:, :-1].argmax(-1)
    step.guess(guessed, guesses)
    draw_all(step, draft)
    draw_all(alone, draft)
    drawn = [row for row in range(ROWS) if row not in guessed]
    tokens = alone.draft_tokens.clone()
    tokens[guessed] = guesses[guessed]
    for row, length in enumerate(LENGTHS.tolist()):
        assert torch.equal(step.draft_tokens[row, :length], tokens[row, :length])
    draft[guessed] = torch.full_like(draft, -torch.inf).scatter(-1, tokens.unsqueeze(-1), 0.0)[guessed]
    known = verify_chain(target, draft, tokens, LENGTHS, *SETTINGS, POSITION)
    for rows in (guessed, drawn):
        assert 0 < int(known.accepted[rows].sum()) < int(LENGTHS[rows].sum())
    assert_verified(step.verify(target), known)


@pytest.mark.parametrize("offset", [0, 1_000_000])
def test_a_guess_may_come_from_another_seed_and_not_from_the_numbers_that_verify_it(offset: int) -> None:
    """Why `PastOutputs` keeps seeds: with the same one the law is missed."""
    rows, p = 20_000, torch.tensor([0.4, 0.3, 0.15, 0.1, 0.05])
    plain, seed, position = torch.ones(rows), torch.arange(rows), np.full(rows, 9)

    def emitted(guesses: Tensor, seeds: Tensor) -> Tensor:
        sampling = checked_sampling(plain, torch.zeros(rows).long(), plain, seeds, rows, CPU)
        drafts = guesses.shape[1]
        drafted = torch.full((rows,), drafts, dtype=torch.int32)
        step = verification_of(sampling, position, drafted, drafts, len(p), torch.float32)
        step.draft_tokens.copy_(guesses)
        return step.verify(p.log().expand(rows, drafts + 1, len(p))).tokens[:, :1]

    before = emitted(torch.empty(rows, 0, dtype=torch.int64), seed + offset)
    counts = emitted(before, seed).flatten().bincount(minlength=len(p))
    found = float(stats.chisquare(counts.numpy(), p.double().numpy() * rows, sum_check=False).pvalue)
    assert found > 1e-3 if offset else found < 1e-6


def test_a_row_cannot_be_guessed_after_a_draw() -> None:
    step, (target, draft) = new_step(), new_logits()
    draw_all(step, draft)
    with pytest.raises(ValueError, match="guessed before anything is drawn"):
        step.guess([0], target[:, :-1].argmax(-1))


def test_a_row_without_usable_logits_is_told_and_others_are_what_they_are_without_it() -> None:
    drafted = torch.full((ROWS,), 2, dtype=torch.int32)
    step, good, (target, draft) = new_step(drafted), new_step(drafted), new_logits()
    draw_all(good, draft)
    usable = draft.clone()
    draft[3, 1] = torch.nan
    draw_all(step, draft)
    expected = good.draft_tokens.clone()
    expected[3, 1] = -1
    assert torch.equal(step.draft_tokens, expected)

    drafted[3] = 1  # as `steps.feed` lowers it
    known = verify_chain(target, usable, expected, drafted, *SETTINGS, POSITION)
    assert_verified(step.verify(target), known)
    target[7, 0] = -torch.inf
    broken = step.verify(target)
    assert broken.status.tolist() == [0] * 7 + [1, 0]
    others = torch.arange(ROWS) != 7
    assert torch.equal(broken.tokens[others], known.tokens[others])
    with pytest.raises(InvalidLogits, match=r"target_logits\[7, 0\]") as refused:
        verify_chain(target, usable, expected, drafted, *SETTINGS, POSITION)
    assert refused.value.rows == (7,)
