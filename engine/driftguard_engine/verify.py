"""Lossless verification of drafts, whoever drew them: the engine's acceptance rule as a function.

Whatever the draft proposes, the emitted tokens have the distribution of sampling from the target alone
(Leviathan et al. 2023; Chen et al. 2023).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from driftguard_engine.kernels.backend import BackendName, BackendUnavailable
from driftguard_engine.kernels.tensor_checks import InvalidLogits, checked_sampling, expect, expect_range
from driftguard_engine.speculation import SpeculativeStep, VerifyResult

__all__ = ["BackendName", "BackendUnavailable", "InvalidLogits", "VerifyResult", "verify_chain"]


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
) -> VerifyResult:
    """Accept the drafted run of each row up to the first rejection, and add one token of the target's own.

    With p and q the distributions of target and draft at a step, after temperature, top-k and top-p: token x
    is accepted iff u q(x) < p(x). The first rejected one is replaced by a draw from (p - q)+ (from p, where
    rounding leaves that empty); when none is rejected, the bonus is drawn from p. Temperature 0 accepts
    the target's argmax alone, and does not read the draft's logits.

    target_logits, draft_logits: raw, any float dtype; probabilities are computed in float32 or better. -inf
        rules a token out. An n-gram proposal is 0 at its token and -inf elsewhere.
    draft_lengths: 0 .. K. What lies beyond a row's length is never read.
    draft_tokens: an id outside 0 .. V-1 (-1: no proposal) is rejected and replaced by a draw from p. That
        is lossless when the id was no draw from q: q is a distribution over the V tokens, so it never is.
    temperature: finite, >= 0; 0 is argmax. top_k: <= 0 or >= V is off. top_p: >= 0; >= 1 is off; the
        likeliest token always stays. Equal logits: the lower token id comes first, in all three.
    seed, position: the row's noise. position is the index in its sequence of the first token emitted here.
        A draft for step i must be drawn by `SpeculativeStep.draw`, or with noise independent of this.

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
    step = SpeculativeStep(sampling, position.tolist(), rows - 1, size, device, backend)
    step.offer(draft_logits.detach(), draft_tokens, draft_lengths.tolist())
    longest = max(map(len, step.proposals))
    result = step.outcome(target_logits.detach()[:, : longest + 1], range(batch))
    unused = rows - 1 - longest
    return VerifyResult(
        torch.nn.functional.pad(result.tokens, (0, unused), value=-1).to(device),
        result.accepted.to(device),
        result.emitted.to(device),
    )
