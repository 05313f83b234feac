"""The self-test of the kernels before they serve: drafts and verification of a small batch.

They must give the tokens that the references give.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from driftguard_engine.kernels import ngram
from driftguard_engine.kernels import verify as verify_kernels
from driftguard_engine.kernels.cuda.compiler import KernelsUnavailable
from driftguard_engine.kernels.cuda.launcher import SUFFIXES, Launcher
from driftguard_engine.kernels.reference import verify as reference
from driftguard_engine.kernels.reference.exp2 import fused_exp2
from driftguard_engine.kernels.reference.sampling import SamplingBatch
from driftguard_engine.kernels.reference.verify import Chain
from driftguard_engine.kernels.verify import SamplingTensors, Workspace

_BATCH, _DRAFTS, _SIZE = 6, 3, 5000  # two tiles, the second one short
_SEED = 20


def check(launcher: Launcher, device: torch.device) -> None:
    """Raises KernelsUnavailable: which tokens differ, for which logits."""
    for dtype in ngram.SUFFIXES:
        _check_ngrams(launcher, dtype, device)
    for dtype in SUFFIXES:
        asked = _question(dtype)
        given = _on(asked, device)
        space = Workspace.empty(_BATCH, _DRAFTS, _SIZE, device)
        sampling = SamplingTensors.of(asked.sampling, asked.position, _SIZE, device)
        for step in range(_DRAFTS):
            verify_kernels.draw_drafts(
                launcher, given.draft_logits[:, step].contiguous(), sampling, space, step
            )
        lengths = given.draft_lengths.int()
        verify_kernels.verify(launcher, given.target_logits, given.draft_logits, lengths, sampling, space)
        tokens, accepted = reference.verify_chain(asked, fused_exp2)
        _expect(f"drafts of {dtype} logits", space.draft_tokens, asked.draft_tokens)
        _expect(f"status of {dtype} logits", space.status, torch.zeros(_BATCH))
        _expect(f"accepted of {dtype} logits", space.accepted, accepted)
        _expect(f"tokens of {dtype} logits", space.tokens, tokens)


def _check_ngrams(launcher: Launcher, dtype: torch.dtype, device: torch.device) -> None:
    token_ids = torch.tensor([[1, 2, 9, 1, 2, 8, 1, 2], [1, 2, 3, 9, 2, 4, 1, 2], [1, 2, 3, 4, 5, 6, 7, 8]])
    lengths = torch.tensor([8, 8, 8], dtype=torch.int32)
    tokens = torch.empty(3, _DRAFTS, dtype=torch.int64, device=device)
    counts = torch.empty(3, dtype=torch.int32, device=device)
    ngram.look_up(launcher, token_ids.to(device, dtype), lengths.to(device), 1, 3, tokens, counts)
    known_tokens, known_counts = ngram.reference(token_ids, lengths, 1, 3, _DRAFTS)
    _expect(f"n-gram drafts of {dtype} tokens", tokens, known_tokens)
    _expect(f"n-gram draft lengths of {dtype} tokens", counts, known_counts)


def _expect(what: str, found: Tensor, known: Tensor) -> None:
    if not torch.equal(found.cpu().long(), known.long()):
        raise KernelsUnavailable(
            f"the kernels fail their self-test: {what} are {found.tolist()}, not {known.tolist()}"
        )


def _question(dtype: torch.dtype) -> Chain:
    random = torch.Generator().manual_seed(_SEED)
    target = (3 * torch.randn(_BATCH, _DRAFTS + 1, _SIZE, generator=random)).to(dtype)
    draft = (target[:, :-1] + 0.5 * torch.randn(_BATCH, _DRAFTS, _SIZE, generator=random)).to(dtype)
    sampling = SamplingBatch.of(
        torch.tensor([1.0, 0.0, 0.7, 1.0, 1.0, 1.3]),
        torch.tensor([0, 0, 20, 0, 0, 0]),
        torch.tensor([1.0, 1.0, 0.9, 1.0, 0.5, 1.0]),
        torch.arange(_BATCH) + _SEED,
    )
    position = np.arange(_BATCH)
    steps = [
        reference.sample_draft(draft[:, step], sampling, position + step, fused_exp2)
        for step in range(_DRAFTS)
    ]
    lengths = torch.tensor([3, 3, 3, 0, 2, 3])
    return Chain(target, draft, torch.stack(steps, 1), lengths, sampling, position)


def _on(chain: Chain, device: torch.device) -> Chain:
    return Chain(
        chain.target_logits.to(device),
        chain.draft_logits.to(device),
        chain.draft_tokens.to(device),
        chain.draft_lengths.to(device),
        chain.sampling,
        chain.position,
    )
