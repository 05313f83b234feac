"""The self-test of the kernels before they serve: drafts, verification and the steps of a small batch.

They must give what the references give.
"""

from __future__ import annotations

from itertools import product
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from driftguard_engine.kernels import ngram, steps
from driftguard_engine.kernels import verify as verify_kernels
from driftguard_engine.kernels.cuda.compiler import KernelsUnavailable
from driftguard_engine.kernels.cuda.launcher import SUFFIXES, Launcher
from driftguard_engine.kernels.reference import verify as reference
from driftguard_engine.kernels.reference.distribution import token_distributions
from driftguard_engine.kernels.reference.exp2 import fused_exp2
from driftguard_engine.kernels.reference.sampling import SamplingBatch
from driftguard_engine.kernels.reference.verify import Chain, Rule
from driftguard_engine.kernels.steps import DraftContext, SlotState
from driftguard_engine.kernels.verify import SamplingTensors, Workspace

_BATCH, _DRAFTS, _SIZE = 6, 3, 5000  # three tiles, the last one short
_SHARED_ROWS, _SHARED_SIZE = 2, 20_000  # ten tiles, two blocks to a row
_SEED = 20
_OF_ROWS = ("lengths", "seeds", "scales", "top_ps", "top_ks", "starts", "drafted", "fed")
_OF_DRAFTS = ("token_ids", "chosen", "starts", "next")


def check(launcher: Launcher, device: torch.device) -> None:
    """Raises KernelsUnavailable: what differs, for which logits."""
    _check_steps(launcher, device)
    for dtype in SUFFIXES:
        _check_cuts(launcher, dtype, device)
    for dtype in ngram.SUFFIXES:
        _check_ngrams(launcher, dtype, device)
    for dtype, rule in product(SUFFIXES, get_args(Rule)):
        asked = _question(dtype, rule)
        given = _on(asked, device)
        space = Workspace.empty(_BATCH, _DRAFTS, _SIZE, device, rule=rule)
        sampling = SamplingTensors.of(asked.sampling, asked.position, _SIZE, device)
        for step in range(_DRAFTS):
            verify_kernels.draw_drafts(
                launcher, given.draft_logits[:, step].contiguous(), sampling, space, step
            )
        lengths = given.draft_lengths.int()
        verify_kernels.verify(launcher, given.target_logits, given.draft_logits, lengths, sampling, space)
        tokens, accepted = reference.verify_chain(asked, fused_exp2, rule)
        what = f"of {dtype} logits by the {rule} rule"
        _expect(f"drafts {what}", space.draft_tokens, asked.draft_tokens)
        _expect(f"status {what}", space.status, torch.zeros(_BATCH))
        _expect(f"accepted {what}", space.accepted, accepted)
        _expect(f"tokens {what}", space.tokens, tokens)


def _check_cuts(launcher: Launcher, dtype: torch.dtype, device: torch.device) -> None:
    """Of rows that several blocks share, most of whose logits stay."""
    random = torch.Generator().manual_seed(_SEED)
    logits = torch.randn(_SHARED_ROWS, 1, _SHARED_SIZE, generator=random).to(dtype)
    one = torch.ones(_SHARED_ROWS)
    sampling = SamplingBatch.of(one, 0 * one.long(), 0.9 * one, one.long())
    space = Workspace.empty(_SHARED_ROWS, 1, _SHARED_SIZE, device)
    settings = SamplingTensors.of(sampling, np.zeros(_SHARED_ROWS, np.int64), _SHARED_SIZE, device)
    verify_kernels.draw_drafts(launcher, logits[:, 0].to(device), settings, space, 0)
    known = token_distributions(logits.float().numpy(), sampling, fused_exp2)
    by_kernels = {"cut": space.draft.cut, "cut_token": space.draft.cut_token, "normaliser": space.draft.kept}
    for name, values in by_kernels.items():
        found, expected = values.cpu().numpy(), getattr(known, name)[:, 0]
        if not np.array_equal(found, expected):
            raise KernelsUnavailable(
                f"the kernels fail their self-test: {name} of shared rows of {dtype} logits is"
                f" {found.tolist()}, not {expected.tolist()}"
            )


def _check_ngrams(launcher: Launcher, dtype: torch.dtype, device: torch.device) -> None:
    token_ids = torch.tensor([[1, 2, 9, 1, 2, 8, 1, 2], [1, 2, 3, 9, 2, 4, 1, 2], [1, 2, 3, 4, 5, 6, 7, 8]])
    slots, lengths = torch.tensor([2, 0, 1]), torch.tensor([8, 7, 8])
    tokens = torch.empty(3, _DRAFTS, dtype=torch.int64, device=device)
    there = token_ids.to(device, dtype)
    ngram.look_up(launcher, there, slots.to(device), lengths.to(device), 1, 3, tokens)
    known = ngram.reference(token_ids, slots, lengths, 1, 3, _DRAFTS)
    _expect(f"n-gram drafts of {dtype} tokens", tokens, known)


def _check_steps(launcher: Launcher, device: torch.device) -> None:
    """A step of rows that end by a token, by their limit, by unusable logits, and that had ended."""
    found, known = _step(launcher, device), _step(None, torch.device("cpu"))
    for name, expected in known.items():
        _expect(f"{name} of a step", found[name], expected)


def _step(launcher: Launcher | None, device: torch.device) -> dict[str, Tensor]:
    def there(*values: int | float) -> Tensor:
        return torch.tensor(values, device=device)

    shares = there(0.25, 0.5, 1.0, 0.75, 0.0).float()
    state = SlotState(
        token_ids=torch.arange(60, device=device).view(5, 12) % 17,
        lengths=there(3, 8, 5, 1, 4),
        limits=there(12, 10, 9, 12, 9),
        ended=there(0, 0, 0, 0, 1),
        heeds_ends=there(1, 0, 1, 1, 1),
        seeds=there(7, 2**62, 0, 5, 1),
        temperatures=shares,
        scales=shares + 1,
        top_ps=shares,
        top_ks=there(0, 9, 40, 2**31 - 1, 1).int(),
        eos_token_ids=there(3, 16),
    )
    queued = torch.stack([there(4, 2, 0, 1, 3, 4), there(3, 2, 3, 3, 3, 0)])
    draft_tokens = torch.stack([there(5, 16, 2), there(4, -1, 1), *[there(8, 3, 9)] * 4])
    rows = steps.begin(launcher, state, queued, _DRAFTS, DraftContext(length=7, vocabulary=11))
    steps.feed(launcher, rows, draft_tokens, 0, _DRAFTS)
    tokens = torch.cat([draft_tokens, there(6, 6, 16, 6, 6, 6)[:, None]], 1)
    accepted, status = there(0, 3, 3, 1, -1, 2).int(), there(1, 0, 0, 0, 1, 0).int()
    outputs = steps.append(launcher, rows, tokens, accepted, status)
    left = [
        *((f"{name} of the rows", getattr(rows, name)) for name in _OF_ROWS),
        *((f"{name} of the draft's inputs", getattr(rows.draft, name)) for name in _OF_DRAFTS),
        *((f"{name} of the slots", getattr(state, name)) for name in ("token_ids", "lengths", "ended")),
    ]
    return dict(left) | {"outputs": outputs}


def _expect(what: str, found: Tensor, known: Tensor) -> None:
    if not torch.equal(found.cpu().to(known.dtype), known):
        raise KernelsUnavailable(
            f"the kernels fail their self-test: {what} are {found.tolist()}, not {known.tolist()}"
        )


def _question(dtype: torch.dtype, rule: Rule) -> Chain:
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
    tokens = reference.draw_chain(draft, sampling, position, rule, fused_exp2)
    lengths = torch.tensor([3, 3, 3, 0, 2, 3])
    return Chain(target, draft, tokens, lengths, sampling, position)


def _on(chain: Chain, device: torch.device) -> Chain:
    return Chain(
        chain.target_logits.to(device),
        chain.draft_logits.to(device),
        chain.draft_tokens.to(device),
        chain.draft_lengths.to(device),
        chain.sampling,
        chain.position,
    )
