"""The verify backend of a device: CUDA kernels that load and pass their self-test, else the reference.

Decided once per device. A fallback is logged as an error, and its reason is kept for metrics and status.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from driftguard_engine.kernels import self_test
from driftguard_engine.kernels.cuda.compiler import KernelsUnavailable
from driftguard_engine.kernels.cuda.launcher import Launcher, LaunchFailed
from driftguard_engine.kernels.cuda.loader import kernels

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
