"""The verify backend of a device: CUDA kernels that load and pass their self-test, else the reference.

Decided once per device. A fallback is logged as an error, and its reason is kept for metrics and status.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal

import torch
from torch import Tensor

from driftguard_engine.kernels import self_test
from driftguard_engine.kernels import verify as verify_kernels
from driftguard_engine.kernels.cuda.compiler import KernelsUnavailable
from driftguard_engine.kernels.cuda.launcher import SUFFIXES, Launcher, LaunchFailed
from driftguard_engine.kernels.cuda.loader import kernels
from driftguard_engine.kernels.reference.sampling import Integers, SamplingBatch
from driftguard_engine.kernels.reference.verify import Chain
from driftguard_engine.kernels.verify import SamplingTensors, Workspace

logger = logging.getLogger(__name__)


BackendName = Literal["auto", "reference", "cuda"]


class BackendUnavailable(RuntimeError):
    """verify backend {backend!r} is not available: {reason}"""

    def __init__(self, backend: str, reason: str) -> None:
        super().__init__(f"verify backend {backend!r} is not available: {reason}")


@dataclass(frozen=True, slots=True)
class Backend:
    """launcher: of the kernels; None: the reference verifies. fallback: why it does so on a CUDA device."""

    launcher: Launcher | None
    fallback: str | None = None

    @property
    def name(self) -> BackendName:
        return "reference" if self.launcher is None else "cuda"


@cache
def backend_of(device: torch.device) -> Backend:
    """Compiles and loads at the first call for a device, which takes seconds where nothing is cached."""
    if device.type != "cuda":
        return Backend(None)
    try:
        launcher = kernels(device)
        self_test.check(launcher, device)
    except (KernelsUnavailable, LaunchFailed) as problem:
        logger.error(
            "the reference verifies on %s instead of the CUDA kernels, which is slower: %s", device, problem
        )
        return Backend(None, str(problem))
    logger.info("CUDA kernels verify on %s", device)
    return Backend(launcher)


def launcher_of(device: torch.device, requested: BackendName = "auto") -> Launcher | None:
    """The launcher of the kernels; None: the reference computes. Raises BackendUnavailable, ValueError."""
    if requested not in ("auto", "reference", "cuda"):
        raise ValueError(f"backend must be 'auto', 'reference' or 'cuda', got {requested!r}")
    if requested == "reference":
        return None
    backend = backend_of(device)
    if requested == "cuda" and backend.launcher is None:
        raise BackendUnavailable("cuda", backend.fallback or f"the tensors are on {device}")
    return backend.launcher


@dataclass(frozen=True, slots=True)
class Verified:
    """The outcome of a verification of B requests, on their device."""

    tokens: Tensor  # [B, K+1] int64
    accepted: Tensor  # [B] int64; of a step by kernels int32
    status: Tensor  # [B] int32: 0, or which logits have no distribution (1 the target's, 2 the draft's)


def verify_chain(launcher: Launcher, chain: Chain) -> Verified:
    """`reference.verify_chain` by kernels. Rows without a distribution get -1 and a status."""
    batch, steps, size = chain.target_logits.shape
    # One dtype for both, and never a narrower one: the drafts were drawn from the logits as they were.
    same = chain.target_logits.dtype == chain.draft_logits.dtype
    target, draft = (
        _readable(logits if same else logits.float()) for logits in (chain.target_logits, chain.draft_logits)
    )
    space = _workspace(batch, steps - 1, size, target.device)
    sampling = SamplingTensors.of(chain.sampling, chain.position, size, target.device)
    lengths = chain.draft_lengths.int()
    if steps > 1:
        space.draft_tokens.copy_(chain.draft_tokens)
        verify_kernels.find_distributions(
            launcher, draft, lengths, sampling, space.draft, steps - 1, 0, space.meetings
        )
    verify_kernels.verify(launcher, target, draft if steps > 1 else None, lengths, sampling, space)
    return Verified(space.tokens.clone(), space.accepted.long(), space.status.clone())


def sample_draft(launcher: Launcher, logits: Tensor, sampling: SamplingBatch, position: Integers) -> Tensor:
    """`reference.sample_draft` by kernels; -1 for rows without a distribution. logits [B, V] -> int64 [B]."""
    batch, size = logits.shape
    space = _workspace(batch, 1, size, logits.device)
    there = SamplingTensors.of(sampling, position, size, logits.device)
    verify_kernels.draw_drafts(launcher, _readable(logits), there, space, 0)
    return space.draft_tokens[:, 0].clone()


@lru_cache(maxsize=64)
def _workspace(batch: int, drafts: int, size: int, device: torch.device) -> Workspace:
    return Workspace.empty(batch, drafts, size, device)


def _readable(logits: Tensor) -> Tensor:
    """The logits in a dtype that the kernels read, each row contiguous, rows at a constant stride."""
    if logits.dtype not in SUFFIXES:
        logits = logits.float()
    return logits.contiguous()
