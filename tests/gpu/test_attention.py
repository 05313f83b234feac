"""On a device, attention is the torch function, but for roundings; a sequence's bits are its own."""

from __future__ import annotations

import pytest
import torch
from driftguard_engine.kernels.cuda.loader import Kernels

from tests.engine.kernels.layer_cases import DTYPES, Attending, check_attend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

RAGGED = [0, 1, 250, 251, 252, 511, 1000, 2040]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [16, 64, 80, 96, 128, 256])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads"), [(1, 4, 4), (5, 32, 8), (4, 14, 2), (32, 16, 1)])
def test_attend(
    engine_kernels: Kernels, tokens: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype
) -> None:
    shape = (tokens, heads, kv_heads, dim)
    check_attend(engine_kernels, Attending.make(shape, RAGGED, 2100, dtype, engine_kernels.device), 300)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_long_sequence_beside_short_ones(engine_kernels: Kernels, dtype: torch.dtype) -> None:
    starts = [131_000, 3, 70_000]
    given = Attending.make((2, 4, 2, 128), starts, 131_072, dtype, engine_kernels.device)
    check_attend(engine_kernels, given, 500)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_grid_changes_nothing(engine_kernels: Kernels, dtype: torch.dtype) -> None:
    given = Attending.make((5, 32, 8, 128), RAGGED * 5, 2100, dtype, engine_kernels.device)
    expected = given.by_kernels(engine_kernels, 1)
    for blocks in (7, 132, 1000, 100_000):
        assert torch.equal(given.by_kernels(engine_kernels, blocks), expected), f"{blocks} blocks"


def test_a_replayed_graph_reads_where_the_sequences_are_now(engine_kernels: Kernels) -> None:
    given = Attending.make((5, 8, 2, 128), [1500, 0, 700], 1600, torch.bfloat16, engine_kernels.device)
    given.cache.keys.nan_to_num_()
    given.cache.values.nan_to_num_()
    given.by_kernels(engine_kernels, 300)  # every kernel is found and loaded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        mixed = given.by_kernels(engine_kernels, 300)
    for starts in ([3, 1200, 255], [1595, 251, 0]):
        given.rows.starts.copy_(torch.tensor(starts))
        given.rows.slots.copy_(given.rows.slots.roll(1))
        expected = given.by_kernels(engine_kernels, 300)
        mixed.zero_()
        graph.replay()
        assert torch.equal(mixed, expected), f"starts {starts}"
