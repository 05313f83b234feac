"""Lossless verification: the one place where draft tokens are accepted.

Whatever the draft proposes, the emitted tokens have the law of sampling from the target alone
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
from driftguard_engine.kernels import reference
from driftguard_engine.kernels.backend import backend_of
from driftguard_engine.kernels.distribution import Shaping, Truths
from driftguard_engine.kernels.exp2 import Singles
from driftguard_engine.kernels.launches import Launcher
from driftguard_engine.kernels.reference import Arrays

Backend = Literal["auto", "reference", "cuda"]


class BackendUnavailable(RuntimeError):
    """verify backend {backend!r} is not available: {reason}"""

    def __init__(self, backend: str, reason: str) -> None:
        super().__init__(f"verify backend {backend!r} is not available: {reason}")


class InvalidLogits(ValueError):
    """{argument}{index}: NaN, +inf, or nothing above -inf; a row of logits needs a finite maximum.

    `rows` are the batch rows concerned: the others can be verified without them.
    """

    def __init__(self, argument: str, indices: list[list[int]]) -> None:
        more = f" (and {len(indices) - 1} more)" if len(indices) > 1 else ""
        super().__init__(
            f"{argument}{indices[0]}{more}: NaN, +inf, or nothing above -inf; "
            "a row of logits needs a finite maximum"
        )
        self.rows = tuple(sorted({index[0] for index in indices}))


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

    With p and q the laws of target and draft at a step, after temperature, top-k and top-p: token x is
    accepted iff u q(x) < p(x). The first rejected one is replaced by a draw from (p - q)+ (from p, where
    rounding leaves that empty); when none is rejected, the bonus is drawn from p. Temperature 0 accepts
    the target's argmax alone, and does not read the draft's logits.

    target_logits, draft_logits: raw, any float dtype; laws are computed in float32 or better. -inf rules
        a token out. An n-gram proposal is 0 at its token and -inf elsewhere.
    draft_lengths: 0 .. K. What lies beyond a row's length is never read.
    draft_tokens: an id outside 0 .. V-1 (-1: no proposal) is rejected and replaced by a draw from p. That
        is lossless when the id was no draw from q: q is a law over the V tokens, so it never is.
    temperature: finite, >= 0; 0 is argmax. top_k: <= 0 or >= V is off. top_p: >= 0; >= 1 is off; the
        likeliest token always stays. Equal logits: the lower token id comes first, in all three.
    seed, position: the row's noise. position is the index in its sequence of the first token emitted here.
        A draft drawn for step i must have used `sample_draft` with position + i, or noise of another kind.

    On the CPU a row's result is bitwise independent of the batch around it.
    Raises ValueError (naming the argument), its kind InvalidLogits, BackendUnavailable.
    """
    _expect("target_logits", target_logits, (None, None, None), floating=True)
    launcher = _launcher(target_logits.device, backend)
    device, (batch, rows, size) = target_logits.device, target_logits.shape
    _expect("draft_logits", draft_logits, (batch, rows - 1, size), floating=True, device=device)
    _expect("draft_tokens", draft_tokens, (batch, rows - 1), floating=False, device=device)
    _expect("draft_lengths", draft_lengths, (batch,), floating=False, device=device)
    _expect_range("draft_lengths", draft_lengths, 0, rows - 1)
    shaping, noise = _sampling(temperature, top_k, top_p, seed, position, batch, device)

    chain = reference.Chain(
        target_logits.detach(),
        draft_logits.detach(),
        draft_tokens.long(),
        draft_lengths.long(),
        shaping,
        noise,
    )
    if launcher is not None:
        verified = by_kernels.verify_chain(launcher, chain)
        if bool(verified.status.any()):
            _expect_all_laws(Arrays.of(chain))
            raise AssertionError(f"kernels miss laws that torch finds: {verified.status.tolist()}")
        return VerifyResult(verified.tokens, verified.accepted, verified.accepted + 1)
    given = Arrays.of(chain)
    tokens, accepted, lawful = reference.verify(given)
    if not lawful:
        _expect_all_laws(given)
    found = (torch.from_numpy(values) for values in (tokens, accepted, accepted + 1))
    return VerifyResult(*(found if device.type == "cpu" else (values.to(device) for values in found)))


class DraftSampler:
    """Draws draft tokens of B rows, from exactly the q that `verify_chain` computes.

    What stays the same from one draft step to the next is checked and computed once: a small draft model's
    forward pass is hardly longer than that.
    """

    @torch.no_grad()
    def __init__(
        self,
        temperature: Tensor,  # [B]
        top_k: Tensor,  # [B]
        top_p: Tensor,  # [B]
        seed: Tensor,  # [B]
        position: Tensor,  # [B]
        steps: int = 1,
    ) -> None:
        """position: index in the sequence of the row's first draft token. The rest as `verify_chain`."""
        _expect("temperature", temperature, (None,), floating=True)
        batch, self._device = temperature.shape[0], temperature.device
        self._shaping, self._noise = _sampling(temperature, top_k, top_p, seed, position, batch, self._device)
        self._launcher = _launcher(self._device, "auto")
        if self._launcher is None:
            self._words = reference.draft_words(self._noise, steps)  # [steps, 2, B]

    @torch.no_grad()
    def draw(self, draft_logits: Tensor, step: int = 0, rows: Tensor | None = None) -> Tensor:
        """One token per row of draft_logits [R, V], int64 [R]; rows [R]: which of the B they are (None: all).

        Raises ValueError, InvalidLogits.
        """
        chosen = slice(None) if rows is None else rows.cpu().numpy()
        shaping = self._shaping.rows(chosen)
        batch, device = len(shaping.top_k), self._device
        _expect("draft_logits", draft_logits, (batch, None), floating=True, device=device)
        logits = draft_logits.detach()
        if self._launcher is not None:
            drawn = by_kernels.sample_draft(self._launcher, logits, shaping, self._noise.rows(chosen), step)
            if bool((drawn < 0).any()):
                _expect_laws("draft_logits", reference.singles(logits))
            return drawn
        _expect_laws("draft_logits", reference.singles(logits))
        return reference.sample_draft(logits, shaping, self._words[step][:, chosen])


def sample_draft(
    draft_logits: Tensor,  # [B, V]
    temperature: Tensor,  # [B]
    top_k: Tensor,  # [B]
    top_p: Tensor,  # [B]
    seed: Tensor,  # [B]
    position: Tensor,  # [B]
) -> Tensor:
    """One draft token per row, int64 [B]: `DraftSampler` for a single step.

    position: index in the sequence of the token drawn.
    """
    return DraftSampler(temperature, top_k, top_p, seed, position).draw(draft_logits)


def _sampling(
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    position: Tensor,
    batch: int,
    device: torch.device,
) -> tuple[Shaping, reference.Noise]:
    for name, value in (("temperature", temperature), ("top_p", top_p)):
        _expect(name, value, (batch,), floating=True, device=device)
    for name, value in (("top_k", top_k), ("seed", seed), ("position", position)):
        _expect(name, value, (batch,), floating=False, device=device)
    _expect_range("temperature", temperature, 0, torch.finfo(temperature.dtype).max)
    _expect_range("top_p", top_p, 0, math.inf)
    _expect_range("position", position, 0, math.inf)
    return Shaping.of(temperature, top_k, top_p), reference.Noise.of(seed, position)


def _expect(
    name: str,
    value: Tensor,
    shape: tuple[int | None, ...],
    *,
    floating: bool,
    device: torch.device | None = None,
) -> None:
    """Refuse what is not a tensor of this shape (None: any size from 1), kind of number and device."""
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} must be a torch.Tensor, got {type(value).__name__}")  # noqa: TRY004
    sizes = tuple(value.shape)
    if sizes != shape and not _fits(sizes, shape):
        wanted = ", ".join("at least 1" if want is None else str(want) for want in shape)
        raise ValueError(f"{name} must have shape [{wanted}], got {list(sizes)}")
    kind = value.dtype.is_floating_point
    if kind != floating or (not kind and (value.dtype == torch.bool or value.dtype.is_complex)):
        raise ValueError(f"{name} must hold {'floats' if floating else 'integers'}, got {value.dtype}")
    if device is not None and value.device != device:
        raise ValueError(f"{name} must be on {device} like the logits, got {value.device}")


def _fits(sizes: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    return len(sizes) == len(shape) and all(
        size > 0 if want is None else size == want for size, want in zip(sizes, shape, strict=True)
    )


def _expect_range(name: str, value: Tensor, least: float, most: float) -> None:
    for row, number in enumerate(value.tolist()):
        if not least <= number <= most:  # nor is NaN
            limit = "" if most == math.inf else f" and at most {most:g}"
            raise ValueError(f"{name}[{row}] must be at least {least:g}{limit}, got {number}")


def _expect_all_laws(given: Arrays) -> None:
    """Of the rows that will be read: the draft's only where its tokens were drawn."""
    read = np.arange(given.target.shape[1]) <= given.lengths[:, np.newaxis]
    _expect_laws("target_logits", given.target, read)
    stochastic = ~given.shaping.greedy[:, np.newaxis]
    _expect_laws("draft_logits", given.draft, given.proposed & stochastic)


def _expect_laws(argument: str, logits: Singles, read: Truths | bool = True) -> None:
    """Refuse a row of [..., V] that will be read and has no finite maximum: no law is in it."""
    wrong = ~np.isfinite(logits.max(-1)) & read
    if wrong.any():
        raise InvalidLogits(argument, np.argwhere(wrong).tolist())
