"""On a device, the kernels of a layer are the torch functions, but for roundings."""

from __future__ import annotations

import pytest
import torch
from driftguard_engine.kernels.cuda.loader import Kernels

from tests.engine.kernels.layer_cases import DTYPES, check_gate, check_norm, check_rope_and_store_kv

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_and_gate(engine_kernels: Kernels, dtype: torch.dtype) -> None:
    for rows, size in ((1, 8), (3, 1000), (160, 4096), (7, 8192 + 264), (33, 14336)):
        check_norm(engine_kernels, engine_kernels.device, rows, size, dtype)
        check_gate(engine_kernels, engine_kernels.device, rows, size, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_head_norm", [False, True])
def test_turn_and_store(engine_kernels: Kernels, dtype: torch.dtype, with_head_norm: bool) -> None:
    for shape in ((5, 4, 2, 64), (1, 7, 1, 128), (2, 2, 2, 96), (8, 32, 8, 128), (3, 2, 1, 16)):
        check_rope_and_store_kv(engine_kernels, engine_kernels.device, shape, dtype, with_head_norm)
