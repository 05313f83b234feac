"""Batches with drafts that the kernels drew: several, so that no cache holds the next one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from driftguard_engine.kernels import verify as verify_kernels
from driftguard_engine.kernels.cuda.launcher import Argument, Launcher, Size
from driftguard_engine.kernels.reference.sampling import SamplingBatch
from driftguard_engine.kernels.verify import SamplingTensors, Workspace
from torch import Tensor

from tests.gpu.check.timing import cold_sets

VOCABULARY = 128_256
MOST_SETS = 256


@dataclass(frozen=True, slots=True)
class Sampling:
    """Of every request of a batch."""

    name: str
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def narrows(self) -> bool:
        return self.top_k > 0 or self.top_p < 1


PLAIN = Sampling("temperature 1")
SAMPLINGS = (
    PLAIN,
    Sampling("greedy", temperature=0.0),
    Sampling("top-k 50", top_k=50),
    Sampling("top-p 0.9", top_p=0.9),
    Sampling("top-k 50, top-p 0.9", top_k=50, top_p=0.9),
)


@dataclass(frozen=True, slots=True)
class Batch:
    target: Tensor  # [B, K + 1, V] bfloat16
    draft: Tensor  # [B, K, V] bfloat16
    lengths: Tensor
    settings: SamplingTensors
    space: Workspace

    @property
    def tokens(self) -> Tensor:
        return self.space.draft_tokens

    def verify(self, launcher: Launcher) -> None:
        verify_kernels.verify(launcher, self.target, self.draft, self.lengths, self.settings, self.space)

    def draw(self, launcher: Launcher) -> None:
        """The first step of the drafts."""
        verify_kernels.draw_drafts(launcher, self.draft[:, 0], self.settings, self.space, 0)


@dataclass(frozen=True, slots=True)
class Only:
    """A launcher of the kernels whose names begin so: to time one of several."""

    launcher: Launcher
    prefix: str

    def launch(self, kernel: str, grid: Size, block: int, arguments: Sequence[Argument]) -> None:
        if kernel.startswith(self.prefix):
            self.launcher.launch(kernel, grid, block, arguments)


def floor_bytes(batch: int, drafts: int, size: int = VOCABULARY, element_bytes: int = 2) -> int:
    """What a verification must read at least: the target's rows, and the draft's at the first rejection."""
    return batch * (drafts + 2) * size * element_bytes


def draw_floor_bytes(batch: int, size: int = VOCABULARY, element_bytes: int = 2) -> int:
    return batch * size * element_bytes


def batches(
    launcher: Launcher, device: torch.device, batch: int, drafts: int, sampling: Sampling
) -> list[Batch]:
    """As many as it takes to pass through the cache several times over."""
    wanted = cold_sets(device, floor_bytes(batch, drafts))
    random = torch.Generator(device).manual_seed(batch * 100 + drafts)
    made = []
    for _ in range(min(MOST_SETS, wanted)):
        one = _batch(device, batch, drafts, sampling, random)
        for step in range(drafts):
            verify_kernels.draw_drafts(launcher, one.draft[:, step], one.settings, one.space, step)
        one.verify(launcher)
        made.append(one)
    return made


def mean_accepted(given: Sequence[Batch]) -> float:
    return float(torch.stack([one.space.accepted.float().mean() for one in given]).mean())


def _batch(
    device: torch.device, batch: int, drafts: int, sampling: Sampling, random: torch.Generator
) -> Batch:
    """A draft that is the target with noise: some drafts are rejected, early or late."""
    target = 3 * torch.randn(batch, drafts + 1, VOCABULARY, generator=random, device=device)
    draft = target[:, :-1] + 0.5 * torch.randn(batch, drafts, VOCABULARY, generator=random, device=device)
    one = torch.ones(batch, dtype=torch.float64)
    seeds = torch.randint(0, 2**62, (batch,), generator=random, device=device)
    asked = SamplingBatch.of(
        sampling.temperature * one, torch.full((batch,), sampling.top_k), sampling.top_p * one, seeds
    )
    return Batch(
        target.bfloat16(),
        draft.bfloat16(),
        torch.full((batch,), drafts, dtype=torch.int32, device=device),
        SamplingTensors.of(asked, np.full(batch, 100), VOCABULARY, device),
        Workspace.empty(batch, drafts, VOCABULARY, device),
    )
