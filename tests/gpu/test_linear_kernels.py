"""On a device, linear layers by kernels: exact products but for roundings, whatever the other tokens are."""

from __future__ import annotations

import pytest
import torch
from driftguard_engine.kernels.cuda.loader import Kernels

from tests.engine.kernels.linear_cases import DTYPES, Product

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

# Tokens, features, k: small ones that nothing divides, and the shapes of models.
SHAPES = (
    *((1, 16, 8), (3, 37, 136), (13, 20, 264), (27, 33, 1160)),
    *((1, 4096, 4096), (5, 6144, 4096), (9, 4096, 14336), (16, 32_000, 4096), (32, 2048, 14336)),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(engine_kernels: Kernels, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    given = Product.make(shape, dtype, engine_kernels.device, with_bias=shape[1] != 4096)
    given.check(engine_kernels)
    given.check_rows(engine_kernels)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gated_products(engine_kernels: Kernels, dtype: torch.dtype) -> None:
    for shape in ((2, 48, 160), (11, 14, 48), (5, 2 * 14336, 4096), (24, 2 * 1000, 1032)):
        given = Product.make(shape, dtype, engine_kernels.device, with_bias=shape[0] == 2)
        given.check_gated(engine_kernels)
