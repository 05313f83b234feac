"""The kernels of the engine, run thread by thread on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from driftguard_engine import kernels
from driftguard_engine.kernels.cuda.launcher import Argument, Size
from torch import Tensor

from tests.engine.simt.emulator import Module

SOURCES = sorted((Path(kernels.__file__).parent / "csrc").glob("*.cu"))


@dataclass(frozen=True)
class Emulated:
    """A `Launcher`. seed: of the order in which blocks and threads run."""

    module: Module
    seed: int = 0

    def launch(self, kernel: str, grid: Size, block: int, arguments: Sequence[Argument]) -> None:
        given = [_as_array(argument) if isinstance(argument, Tensor) else argument for argument in arguments]
        self.module.launch(kernel, grid=grid, block=(block,), args=given, seed=self.seed)


def _as_array(tensor: Tensor) -> Any:
    """The same memory, from the first element to the last; bfloat16, which numpy lacks, as its bits."""
    if not tensor.is_contiguous():
        sizes = zip(tensor.shape, tensor.stride(), strict=True)
        tensor = tensor.as_strided((1 + sum((size - 1) * stride for size, stride in sizes),), (1,))
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
