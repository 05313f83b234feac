"""A speculative step keeps what its drafts were drawn from, and emits what the same logits give."""

from __future__ import annotations

import pytest
import torch
from driftguard_engine.kernels.tensor_checks import InvalidLogits, checked_sampling
from driftguard_engine.speculation import SpeculativeStep
from driftguard_engine.verify import verify_chain
from torch import Tensor

from tests.engine.verify.distributions import sample_draft

CPU = torch.device("cpu")
ROWS, DRAFTS, SIZE = 9, 3, 4099  # two tiles
TEMPERATURE = torch.tensor([1.0, 0.0, 0.7, 1.0, 2.5, 0.0, 1.0, 1.3, 1.0])
TOP_K = torch.tensor([0, 3, 0, 50, 0, 0, 1, 0, 0])
TOP_P = torch.tensor([1.0, 1.0, 0.9, 1.0, 0.3, 1.0, 1.0, 1.0, 1.0])
SEED, POSITION = torch.arange(ROWS) + 5, torch.arange(ROWS) + 40
LENGTHS = torch.arange(ROWS) % (DRAFTS + 1)
SETTINGS = (TEMPERATURE, TOP_K, TOP_P, SEED)


def new_step() -> SpeculativeStep:
    return SpeculativeStep(checked_sampling(*SETTINGS, ROWS, CPU), POSITION.tolist(), DRAFTS, SIZE, CPU)


def new_logits() -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(21)
    target = 2 * torch.randn(ROWS, DRAFTS + 1, SIZE, generator=random)
    return target, target[:, :-1] + 0.3 * torch.randn(ROWS, DRAFTS, SIZE, generator=random)


def draw_all(step: SpeculativeStep, draft: Tensor, lengths: Tensor) -> None:
    for drawn in range(draft.shape[1]):
        rows = (lengths > drawn).nonzero()[:, 0]
        step.draw(draft[rows, drawn], rows.tolist())


def padded(proposals: list[list[int]]) -> Tensor:
    return torch.tensor([tokens + [-1] * (DRAFTS - len(tokens)) for tokens in proposals])


def test_a_step_emits_what_its_logits_give() -> None:
    step, (target, draft) = new_step(), new_logits()
    draw_all(step, draft, LENGTHS)
    for row, tokens in enumerate(step.proposals):
        one = slice(row, row + 1)
        asked = (TEMPERATURE[one], TOP_K[one], TOP_P[one], SEED[one])
        assert tokens == [
            int(sample_draft(draft[one, drawn], *asked, POSITION[one] + drawn))
            for drawn in range(int(LENGTHS[row]))
        ]
    known = verify_chain(target, draft, padded(step.proposals), LENGTHS, *SETTINGS, POSITION)
    emitted = [row[:count] for row, count in zip(known.tokens.tolist(), known.emitted.tolist(), strict=True)]
    assert step.verify(target, range(ROWS)) == emitted
    assert 0 < int(known.accepted.sum()) < int(LENGTHS.sum())
    some = [0, 2, 4, 5, 6]
    assert step.verify(target[some, :3], some) == [emitted[row] for row in some]


def test_a_guess_is_certain() -> None:
    step, (target, _) = new_step(), new_logits()
    likeliest = target[:, :-1].argmax(-1)
    point = torch.full((ROWS, DRAFTS, SIZE), -torch.inf).scatter(-1, likeliest.unsqueeze(-1), 0.0)
    for row in range(ROWS):
        step.guess(row, likeliest[row, : LENGTHS[row]].tolist())
    known = verify_chain(target, point, padded(step.proposals), LENGTHS, *SETTINGS, POSITION)
    emitted = [row[:count] for row, count in zip(known.tokens.tolist(), known.emitted.tolist(), strict=True)]
    assert step.verify(target, range(ROWS)) == emitted
    assert 0 < int(known.accepted.sum()) < int(LENGTHS.sum())


def test_drafts_that_fail_are_withdrawn_and_others_verified() -> None:
    step, (target, draft) = new_step(), new_logits()
    step.draw(draft[:, 0], range(ROWS))
    draft[3, 1] = torch.nan
    with pytest.raises(InvalidLogits, match=r"draft_logits\[3\]"):
        step.draw(draft[:, 1], range(ROWS))
    step.withdraw(range(3, 6))
    lengths = torch.tensor([1, 1, 1, 0, 0, 0, 1, 1, 1])
    known = verify_chain(target, draft, padded(step.proposals), lengths, *SETTINGS, POSITION)
    emitted = [row[:count] for row, count in zip(known.tokens.tolist(), known.emitted.tolist(), strict=True)]
    assert step.verify(target[:, :2], range(ROWS)) == emitted
    target[7, 0] = -torch.inf
    with pytest.raises(InvalidLogits, match=r"target_logits\[7, 0\]") as refused:
        step.verify(target[:, :2], range(ROWS))
    assert refused.value.rows == (7,)


def test_what_does_not_fit_is_refused() -> None:
    step, (target, draft) = new_step(), new_logits()
    with pytest.raises(ValueError, match=r"draft_logits must have shape \[2, 4099\], got \[3, 4099\]"):
        step.draw(draft[:3, 0], [0, 1])
    step.draw(draft[:2, 0], [0, 1])
    with pytest.raises(ValueError, match=r"rows \[1, 2\] must have equally many drafts"):
        step.draw(draft[1:3, 1], [1, 2])
    with pytest.raises(ValueError, match=r"target_logits must have shape \[9, 2, 4099\], got \[9, 4, 4099\]"):
        step.verify(target, range(ROWS))
