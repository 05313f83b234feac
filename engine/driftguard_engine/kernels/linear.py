"""Linear layers of a few tokens by kernels that read each weight once: can be captured in a CUDA graph.

Tensors are contiguous (of outputs, each row), aligned to 16 bytes (but outputs) and of one dtype out of
`DTYPES`. An output's bits depend on its own token and weights alone: neither the number of tokens nor a
token's place changes them.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from driftguard_engine.kernels.cuda.launcher import SUFFIXES, Launcher
from driftguard_engine.kernels.reference.tiles import RUN

DTYPES = (torch.bfloat16, torch.float16)
MOST_TOKENS = 32
_ALIGNMENT_BYTES = 16
_THREADS, _ROWS, _TOKEN_TILE = 256, 16, 8  # as in csrc: of a block, rows of a weight, tokens


def obstacle(weight: Tensor) -> str | None:
    """Why the kernels cannot multiply by weight [N, K]."""
    if weight.dtype not in DTYPES:
        return f"the kernels of a linear layer do not read {weight.dtype}"
    if weight.shape[1] % RUN:
        return f"the kernels of a linear layer need K to be a multiple of {RUN}, not {weight.shape[1]}"
    if weight.data_ptr() % _ALIGNMENT_BYTES or not weight.is_contiguous():
        return f"the kernels of a linear layer need a contiguous weight, aligned to {_ALIGNMENT_BYTES} bytes"
    return None


def linear(launcher: Launcher, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """y = x W^T + b: x [M, K], weight [N, K], bias [N], y [M, N], M from 1 to MOST_TOKENS.

    Raises ValueError (M out of range, a y of another dtype or whose rows are not contiguous, an `obstacle`).
    """
    _launch(launcher, "linear", _ROWS, x, weight, bias, y)


def linear_gated(launcher: Launcher, x: Tensor, weight: Tensor, bias: Tensor | None, gated: Tensor) -> None:
    """`layer_launches.gate` of `linear`, bit for bit: weight [2 I, K], bias [2 I], gated [M, I].

    Raises ValueError (as `linear`).
    """
    _launch(launcher, "linear_gated", _ROWS // 2, x, weight, bias, gated)


def _launch(
    launcher: Launcher, kernel: str, features: int, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor
) -> None:
    """features: how many of y a block computes."""
    (tokens, inner), size = x.shape, y.shape[1]
    problem = obstacle(weight)
    if problem is not None:
        raise ValueError(problem)
    if not 1 <= tokens <= MOST_TOKENS:
        raise ValueError(f"the kernels of a linear layer take 1 to {MOST_TOKENS} tokens, not {tokens}")
    if y.dtype != x.dtype or y.stride(1) != 1:
        raise ValueError(
            f"the kernels of a linear layer write contiguous rows of {x.dtype}, "
            f"not {y.dtype} with strides {y.stride()}"
        )
    tiles = 1 if tokens <= _TOKEN_TILE else 2 if tokens <= 2 * _TOKEN_TILE else 4
    launcher.launch(
        f"{kernel}_{tiles}_{SUFFIXES[x.dtype]}",
        (-(-size // features), 1, 1),
        _THREADS,
        [x, weight, bias, np.int32(tokens), np.int32(inner), np.int32(size), np.int64(y.stride(0)), y],
    )
