"""The kernels of a layer are the torch functions, but for roundings."""

from __future__ import annotations

import pytest
import torch
from driftguard_engine.kernels import layer_launches
from driftguard_engine.kernels.layers import KeysValues, Norm

from tests.engine.kernels.emulated import Emulated
from tests.engine.kernels.layer_cases import (
    DTYPES,
    LENGTH,
    check_gate,
    check_norm,
    check_rope_and_store_kv,
    rows_at,
)
from tests.engine.simt.emulator import Module

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm(module: Module, dtype: torch.dtype) -> None:
    for rows, hidden in ((3, 64), (2, 1000), (1, 8), (2, 8192 + 264)):  # the last in more than one round
        check_norm(Emulated(module, hidden), CPU, rows, hidden, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gate(module: Module, dtype: torch.dtype) -> None:
    for rows, size in ((5, 40), (1, 8), (2, 2056)):
        check_gate(Emulated(module), CPU, rows, size, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_head_norm", [False, True])
def test_turn_and_store(module: Module, dtype: torch.dtype, with_head_norm: bool) -> None:
    for shape in ((5, 4, 2, 64), (1, 7, 1, 128), (2, 2, 2, 96), (3, 2, 1, 16)):
        check_rope_and_store_kv(Emulated(module), CPU, shape, dtype, with_head_norm)


def test_a_token_past_the_end_of_its_slot_is_not_stored(module: Module) -> None:
    rows = rows_at([LENGTH - 1], 16, torch.float32, CPU, LENGTH)
    cache = KeysValues(torch.zeros(2 * LENGTH, 1, 16), torch.zeros(2 * LENGTH, 1, 16), LENGTH)
    queries = torch.empty(1, 2, 1, 16)
    layer_launches.rope_and_store_kv(Emulated(module), torch.ones(2, 48), 1, None, rows, cache, queries)
    assert bool((cache.values[LENGTH - 1] == 1).all())
    assert not cache.values[LENGTH:].any()
    assert not cache.keys[LENGTH:].any()


def test_sizes_that_the_kernels_cannot_read(module: Module) -> None:
    x = torch.zeros(1, 12)
    with pytest.raises(ValueError, match="need hidden to be a multiple of 8, not 12"):
        layer_launches.norm(Emulated(module), x, Norm(x[0], 0.0), x)


@pytest.mark.parametrize("rows", [1, 2, 7, 64])
def test_a_norm_on_the_cpu_has_the_bits_of_torch(rows: int) -> None:
    random = torch.Generator().manual_seed(rows)
    for size in (30, 32, 192, 1024):
        x = 10 * torch.randn(rows, 3, size, generator=random)
        by = Norm(torch.rand(3, size, generator=random), 1e-5)
        assert torch.equal(by.apply(x), torch.rms_norm(x, (size,), None, 1e-5) * by.weight)
