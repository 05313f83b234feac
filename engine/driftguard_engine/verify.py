"""Lossless verification of drafts, whoever drew them: the engine's acceptance rules as a function.

Whatever the draft proposes, the emitted tokens have the distribution of sampling from the target alone
(Leviathan et al. 2023; Chen et al. 2023; Sun et al. 2025).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import get_args

import numpy as np
import torch
from torch import Tensor

from driftguard_engine.kernels.backend import BackendName, BackendUnavailable, launcher_of
from driftguard_engine.kernels.cuda.launcher import SUFFIXES
from driftguard_engine.kernels.reference.sampling import Integers, SamplingBatch
from driftguard_engine.kernels.reference.verify import Rule, singles
from driftguard_engine.kernels.tensor_checks import (
    InvalidLogits,
    checked_sampling,
    expect,
    expect_distributions,
    expect_range,
)
from driftguard_engine.kernels.verify import SamplingTensors
from driftguard_engine.speculation import KernelVerification, ReferenceVerification, Verification

__all__ = ["BackendName", "BackendUnavailable", "InvalidLogits", "VerifyResult", "verify_chain"]


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The outcome of one verification for each of B rows."""

    tokens: Tensor  # [B, K+1] int64, padded with -1
    accepted: Tensor  # [B] int64: draft tokens kept
    emitted: Tensor  # [B] int64: accepted + 1


@torch.no_grad()
def verify_chain(
    target_logits: Tensor,  # [B, K+1, V]
    draft_logits: Tensor,  # [B, K, V]
    draft_tokens: Tensor,  # [B, K]
    draft_lengths: Tensor,  # [B]
    temperature: Tensor,  # [B]
    top_k: Tensor,  # [B]
    top_p: Tensor,  # [B]
    seed: Tensor,  # [B]
    position: Tensor,  # [B]
    backend: BackendName = "auto",
    rule: Rule = "token",
) -> VerifyResult:
    """Accept the beginning of each row's drafted run, and add one token of the target's own.

    With p and q the distributions of target and draft at a step, after temperature, top-k and top-p: token x
    is accepted iff u q(x) < p(x). The first rejected one is replaced by a draw from (p - q)+ (from p, where
    rounding leaves that empty); when none is rejected, the bonus is drawn from p. Temperature 0 accepts
    the target's argmax alone, and does not read the draft's logits.

    rule: so it is by "token". By "block" a run of i drafts may be kept although the token rule would have
        rejected one of them, with r_i = min(r_(i-1) p(x_i) / q(x_i), 1), r_0 = 1: the longest run that passes
        u_i < e_i / (e_i + 1 - r_i), where e_i is the sum of (r_i p - q)+, from which the next token is drawn.
        Behind the last draft q is 0. On average it accepts at least as many tokens.

    target_logits, draft_logits: raw, any float dtype; probabilities are computed in float32 or better. -inf
        rules a token out. An n-gram proposal is 0 at its token and -inf elsewhere.
    draft_lengths: 0 .. K. What lies beyond a row's length is never read.
    draft_tokens: an id outside 0 .. V-1 (-1: no proposal) is rejected and replaced by a draw from p. That
        is lossless when the id was no draw from q: q is a distribution over the V tokens, so it never is.
    temperature: finite, >= 0; 0 is argmax. top_k: <= 0 or >= V is off. top_p: >= 0; >= 1 is off; the
        likeliest token always stays. Equal logits: the lower token id comes first, in all three.
    seed, position: the row's noise. position is the index in its sequence of the first token emitted here.
        A draft for step i must be drawn by `Verification.draw` with this rule, or with noise independent of
        this.

    On the CPU a row's result is bitwise independent of the batch around it.
    Raises ValueError (naming the argument), its subclass InvalidLogits, BackendUnavailable.
    """
    expect("target_logits", target_logits, (None, None, None), floating=True)
    device, (batch, rows, size) = target_logits.device, target_logits.shape
    expect("draft_logits", draft_logits, (batch, rows - 1, size), floating=True, device=device)
    expect("draft_tokens", draft_tokens, (batch, rows - 1), floating=False, device=device)
    expect("draft_lengths", draft_lengths, (batch,), floating=False, device=device)
    expect_range("draft_lengths", draft_lengths, 0, rows - 1)
    sampling = checked_sampling(temperature, top_k, top_p, seed, batch, device)
    expect("position", position, (batch,), floating=False, device=device)
    expect_range("position", position, 0, math.inf)
    target, draft = target_logits.detach(), draft_logits.detach()
    if target.dtype != draft.dtype or target.dtype not in SUFFIXES:
        # One dtype for both, and never a narrower one: the drafts were drawn from the logits as they were.
        target, draft = target.float(), draft.float()
    lengths, positions = draft_lengths.int(), np.array(position.tolist(), np.int64)
    verification = verification_of(sampling, positions, lengths, rows - 1, size, target.dtype, backend, rule)
    verification.offer(draft, draft_tokens.long())
    verified = verification.verify(target.contiguous())
    if bool(verified.status.any()):
        _refuse(target, draft, draft_tokens, lengths, sampling)
        raise AssertionError(f"rows without a distribution are reported: {verified.status.tolist()}")
    accepted = verified.accepted.to(device).long()
    return VerifyResult(verified.tokens.to(device), accepted, accepted + 1)


def verification_of(
    sampling: SamplingBatch,
    positions: Integers,
    drafted: Tensor,
    drafts: int,
    vocabulary: int,
    dtype: torch.dtype,
    backend: BackendName = "auto",
    rule: Rule = "token",
) -> Verification:
    """As a step of the engine has it. drafted [B]: int32, on the device of the logits. dtype: theirs.

    The rest as in `ReferenceVerification`. Raises ValueError, BackendUnavailable.
    """
    if rule not in get_args(Rule):
        raise ValueError(f"rule must be 'token' or 'block', got {rule!r}")
    launcher = launcher_of(drafted.device, backend)
    if launcher is None:
        return ReferenceVerification(sampling, positions, drafted.cpu(), drafts, vocabulary, rule)
    there = SamplingTensors.of(sampling, positions, vocabulary, drafted.device)
    return KernelVerification(launcher, there, drafted, drafts, vocabulary, dtype, rule)


def _refuse(
    target: Tensor, draft: Tensor, draft_tokens: Tensor, lengths: Tensor, sampling: SamplingBatch
) -> None:
    """Raises InvalidLogits for the rows that were read: those of the draft where its tokens were drawn."""
    steps, tokens = np.arange(target.shape[1]), draft_tokens.cpu().numpy()
    read = steps <= lengths.cpu().numpy()[:, np.newaxis]
    expect_distributions("target_logits", singles(target), read)
    drawn = (tokens >= 0) & (tokens < target.shape[-1]) & ~sampling.greedy[:, np.newaxis]
    expect_distributions("draft_logits", singles(draft), read[:, 1:] & drawn)
