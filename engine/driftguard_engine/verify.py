"""Lossless verification: the one place where draft tokens are accepted.

Whatever the draft proposes, the emitted tokens have the distribution of sampling from the target alone
(Leviathan et al. 2023; Chen et al. 2023). Inputs are checked here and computed by a backend.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from driftguard_engine.kernels import backend as by_kernels
from driftguard_engine.kernels.backend import backend_of
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.reference import verify as reference
from driftguard_engine.kernels.reference.distribution import Integers, Shaping
from driftguard_engine.kernels.reference.verify import Arrays, Chain, Noise, StepNoise
from driftguard_engine.kernels.tensor_checks import expect, expect_distributions, expect_range
from driftguard_engine.sampling import Sampling

Backend = Literal["auto", "reference", "cuda"]


class BackendUnavailable(RuntimeError):
    """verify backend {backend!r} is not available: {reason}"""

    def __init__(self, backend: str, reason: str) -> None:
        super().__init__(f"verify backend {backend!r} is not available: {reason}")


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """What one verification emits for each of B rows."""

    tokens: Tensor  # [B, K+1] int64, padded with -1
    accepted: Tensor  # [B] int64: draft tokens kept
    emitted: Tensor  # [B] int64: accepted + 1


def active_backend(device: torch.device | str, requested: Backend = "auto") -> str:
    """The backend that verifies tensors of this device. Raises BackendUnavailable, ValueError."""
    return "reference" if _launcher(torch.device(device), requested) is None else "cuda"


def backend_fallback(device: torch.device | str) -> str | None:
    """Why the reference verifies on a device that the CUDA kernels are meant for; None: nothing fell back."""
    return backend_of(torch.device(device)).fallback


def _launcher(device: torch.device, requested: Backend) -> Launcher | None:
    if requested not in ("auto", "reference", "cuda"):
        raise ValueError(f"backend must be 'auto', 'reference' or 'cuda', got {requested!r}")
    if requested == "reference":
        return None
    backend = backend_of(device)
    if requested == "cuda" and backend.launcher is None:
        raise BackendUnavailable("cuda", backend.fallback or f"the tensors are on {device}")
    return backend.launcher


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
    backend: Backend = "auto",
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
        A draft drawn for step i must have used `sample_draft` with position + i, or noise of another kind.

    On the CPU a row's result is bitwise independent of the batch around it.
    Raises ValueError (naming the argument), its kind InvalidLogits, BackendUnavailable.
    """
    expect("target_logits", target_logits, (None, None, None), floating=True)
    launcher = _launcher(target_logits.device, backend)
    device, (batch, rows, size) = target_logits.device, target_logits.shape
    expect("draft_logits", draft_logits, (batch, rows - 1, size), floating=True, device=device)
    expect("draft_tokens", draft_tokens, (batch, rows - 1), floating=False, device=device)
    expect("draft_lengths", draft_lengths, (batch,), floating=False, device=device)
    expect_range("draft_lengths", draft_lengths, 0, rows - 1)
    sampling = Sampling.of(temperature, top_k, top_p, seed, batch, device)
    noise = _noise(sampling, position, device)
    chain = Chain(
        target_logits.detach(),
        draft_logits.detach(),
        draft_tokens.long(),
        draft_lengths.long(),
        sampling.shaping,
        noise,
    )
    if launcher is not None:
        return verify_by_kernels(launcher, chain)
    given = Arrays.of(chain)
    accepted, own = verify_by_reference(given, StepNoise(noise, rows))
    found = (reference.emitted(given.tokens, accepted, own), accepted, accepted + 1)
    return VerifyResult(*(torch.from_numpy(values).to(device) for values in found))


def verify_by_kernels(launcher: Launcher, chain: Chain) -> VerifyResult:
    """`verify_chain` of checked arguments. Raises InvalidLogits."""
    verified = by_kernels.verify_chain(launcher, chain)
    if bool(verified.status.any()):
        _expect_all_distributions(Arrays.of(chain))
        raise AssertionError(f"kernels miss distributions that torch finds: {verified.status.tolist()}")
    return VerifyResult(verified.tokens, verified.accepted, verified.accepted + 1)


def verify_by_reference(given: Arrays, noise: StepNoise) -> tuple[Integers, Integers]:
    """How many drafts of each row are accepted, and the target's own tokens. Raises InvalidLogits."""
    accepted, own, valid = reference.verify(given, noise)
    if not valid:
        _expect_all_distributions(given)
    return accepted, own


@torch.no_grad()
def sample_draft(
    draft_logits: Tensor,  # [B, V]
    temperature: Tensor,  # [B]
    top_k: Tensor,  # [B]
    top_p: Tensor,  # [B]
    seed: Tensor,  # [B]
    position: Tensor,  # [B]
) -> Tensor:
    """One draft token per row, int64 [B], drawn from exactly the q that `verify_chain` computes.

    position: index in the sequence of the token drawn. The rest as `verify_chain`. Raises ValueError,
    InvalidLogits.
    """
    expect("draft_logits", draft_logits, (None, None), floating=True)
    device, logits = draft_logits.device, draft_logits.detach()
    sampling = Sampling.of(temperature, top_k, top_p, seed, len(logits), device)
    noise, launcher = _noise(sampling, position, device), _launcher(device, "auto")
    if launcher is not None:
        return draw_by_kernels(launcher, logits, sampling.shaping, noise, 0)
    expect_distributions("draft_logits", reference.singles(logits))
    return reference.sample_draft(logits, sampling.shaping, noise, 0)


def draw_by_kernels(launcher: Launcher, logits: Tensor, shaping: Shaping, noise: Noise, step: int) -> Tensor:
    """`sample_draft` of checked arguments, `step` behind the position of the noise. Raises InvalidLogits."""
    drawn = by_kernels.sample_draft(launcher, logits, shaping, noise, step)
    if bool((drawn < 0).any()):
        expect_distributions("draft_logits", reference.singles(logits))
    return drawn


def _noise(sampling: Sampling, position: Tensor, device: torch.device) -> Noise:
    expect("position", position, sampling.seed.shape, floating=False, device=device)
    expect_range("position", position, 0, math.inf)
    return Noise(sampling.seed, np.array(position.tolist()))


def _expect_all_distributions(given: Arrays) -> None:
    """Of the rows that will be read: the draft's only where its tokens were drawn."""
    read = np.arange(given.target.shape[1]) <= given.lengths[:, np.newaxis]
    expect_distributions("target_logits", given.target, read)
    stochastic = ~given.shaping.greedy[:, np.newaxis]
    expect_distributions("draft_logits", given.draft, given.proposed & stochastic)
