"""A speculative step by the kernels: the drafts and tokens of the reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from driftguard_engine import verify
from driftguard_engine.kernels.reference import verify as reference
from driftguard_engine.kernels.reference.exp2 import fused_exp2
from driftguard_engine.kernels.reference.verify import Chain
from driftguard_engine.kernels.tensor_checks import checked_sampling
from driftguard_engine.speculation import Verification
from driftguard_engine.verify import verification_of

from tests.engine.kernels.emulated import Emulated
from tests.engine.simt.emulator import Module

ROWS, DRAFTS, SIZE = 4, 2, 40


def test_a_step_by_kernels_is_that_of_the_reference(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verify, "launcher_of", lambda *_: Emulated(module))
    random = torch.Generator().manual_seed(4)
    target = 2 * torch.randn(ROWS, DRAFTS + 1, SIZE, generator=random)
    draft = target[:, :-1] + 0.3 * torch.randn(ROWS, DRAFTS, SIZE, generator=random)
    top_k, seed = torch.tensor([0, 0, 5, 0]), torch.arange(ROWS)
    asked = (torch.tensor([1.0, 0.0, 0.7, 1.3]), top_k, torch.tensor([1.0, 1.0, 1.0, 0.8]), seed)
    sampling, lengths = checked_sampling(*asked, ROWS, draft.device), torch.tensor([2, 1, 2, 0])

    def new_step(drafted: torch.Tensor = lengths) -> Verification:
        positions = np.full(ROWS, 9)
        return verification_of(sampling, positions, drafted.int(), DRAFTS, SIZE, torch.float32)

    drawn, offered, shorter = new_step(), new_step(), new_step(lengths.clamp(max=1))
    drawn.draft_logits.copy_(draft)
    for each in range(DRAFTS):
        drawn.draw(each)

    steps = [
        reference.sample_draft(draft[:, each], sampling, np.full(ROWS, 9) + each, fused_exp2)
        for each in range(DRAFTS)
    ]
    tokens = torch.stack(steps, 1)
    assert torch.equal(drawn.draft_tokens, tokens)
    offered.offer(draft, tokens)
    chain = Chain(target, draft, tokens, lengths, sampling, np.full(ROWS, 9))
    emitted, accepted = reference.verify_chain(chain, fused_exp2)
    for step in (drawn, offered):
        verified = step.verify(target)
        assert torch.equal(verified.tokens, emitted)
        assert torch.equal(verified.accepted, accepted.int())

    guessing = new_step()
    guesses = target[:, :-1].argmax(-1)
    guessing.guess([0, 1], guesses)
    guessing.draft_logits.copy_(draft)
    guessing.draw(0)  # and further ones of guesses only
    lengths[2], tokens[:2] = 1, guesses[:2]
    assert torch.equal(guessing.draft_tokens[:2], guesses[:2])
    draft[:2] = torch.full_like(draft[:2], -torch.inf).scatter(-1, guesses[:2].unsqueeze(-1), 0.0)
    chain = Chain(target, draft, tokens, lengths, sampling, np.full(ROWS, 9))
    emitted, accepted = reference.verify_chain(chain, fused_exp2)
    lengths_of_step = guessing._drafted  # type: ignore[attr-defined]
    lengths_of_step.copy_(lengths)
    verified = guessing.verify(target)
    assert torch.equal(verified.tokens, emitted)
    assert torch.equal(verified.accepted, accepted.int())

    shorter.offer(draft, tokens)  # and the target has read no more than needed
    verified = shorter.verify(target[:, :2])
    chain = Chain(target, draft, tokens, lengths.clamp(max=1), sampling, np.full(ROWS, 9))
    emitted, accepted = reference.verify_chain(chain, fused_exp2)
    assert torch.equal(verified.tokens, emitted)
    assert torch.equal(verified.accepted, accepted.int())
