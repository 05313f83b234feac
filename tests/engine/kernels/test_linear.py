"""Linear layers by kernels: the exact product but for roundings, whatever the other tokens are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from driftguard_engine.kernels import linear as linear_kernels
from driftguard_engine.kernels.cuda.launcher import Argument, Launcher, Size
from driftguard_engine.kernels.layer_kernels import MOST_TOKENS_BY_KERNEL, LayerKernels
from driftguard_engine.models.linear import GatedProduct, PlainLinear

from tests.engine.kernels.emulated import Emulated
from tests.engine.kernels.linear_cases import DTYPES, Product, whole_numbers
from tests.engine.simt.emulator import Module

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products(module: Module, dtype: torch.dtype) -> None:
    """Tokens, features and k that nothing divides; a k of which some warps have no part, or two."""
    for tokens, size, inner in ((1, 16, 8), (3, 37, 136), (8, 5, 1160), (13, 20, 264), (27, 33, 72)):
        Product.make((tokens, size, inner), dtype, CPU, with_bias=size % 2 == 1).check(Emulated(module, size))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_sums_of_whole_numbers_are_exact(module: Module, dtype: torch.dtype) -> None:
    x, weight = whole_numbers(1, dtype, 10, 1400), whole_numbers(2, dtype, 19, 1400)
    given = Product(x, weight, whole_numbers(3, dtype, 19))
    known = torch.nn.functional.linear(x.double(), weight.double(), whole_numbers(3, torch.float64, 19))
    assert torch.equal(given.by_kernel(Emulated(module), x), known.to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_token_does_not_depend_on_the_others(module: Module, dtype: torch.dtype) -> None:
    for tokens in (5, 9, 32):  # one, two and four tiles of tokens
        Product.make((tokens, 17, 1096), dtype, CPU, with_bias=True).check_rows(Emulated(module))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_gated_product_is_the_gate_of_the_product(module: Module, dtype: torch.dtype) -> None:
    for tokens, size, inner in ((2, 24, 160), (11, 7, 48), (20, 8, 1032)):
        Product.make((tokens, 2 * size, inner), dtype, CPU, with_bias=tokens == 2).check_gated(
            Emulated(module)
        )


@dataclass(frozen=True)
class Noting:
    """A launcher that keeps the names of what it launches."""

    launcher: Launcher
    launched: list[str]

    def launch(self, kernel: str, grid: Size, block: int, arguments: Sequence[Argument]) -> None:
        self.launched.append(kernel)
        self.launcher.launch(kernel, grid, block, arguments)


def test_the_layers_of_few_tokens_are_the_kernels_and_others_are_the_librarys(module: Module) -> None:
    given = Product.make((17, 16, 40), torch.bfloat16, CPU, with_bias=True)
    noting = Noting(Emulated(module), [])
    layer = PlainLinear(given.weight, given.bias, LayerKernels(noting))
    gated = GatedProduct(given.weight, given.bias, LayerKernels(noting))
    few = layer.apply(given.x[:MOST_TOKENS_BY_KERNEL])
    gated.apply(given.x[:3])
    assert noting.launched == ["linear_2_bf16", "linear_gated_1_bf16"]
    torch.testing.assert_close(layer.apply(given.x)[:MOST_TOKENS_BY_KERNEL], few)
    assert noting.launched[2:] == []
    first = few.new_zeros(MOST_TOKENS_BY_KERNEL + 1, 2, 10)
    layer.apply_into(given.x[:MOST_TOKENS_BY_KERNEL], first[:-1, 1])
    assert noting.launched[2:] == ["linear_2_bf16"]
    assert torch.equal(first[:-1, 1], few[:, :10])
    layer.apply_into(given.x, first[:, 1])
    torch.testing.assert_close(first[:-1, 1], few[:, :10])
    assert noting.launched[3:] == []
    assert not first[:, 0].any()
    gated.apply(given.x)
    PlainLinear(given.weight.float(), None, LayerKernels(noting)).apply(given.x[:1].float())
    assert noting.launched[3:] == ["gate_bf16"]


def test_what_the_kernels_cannot_multiply(module: Module) -> None:
    weight = torch.zeros(4, 24, dtype=torch.float16)
    assert linear_kernels.obstacle(weight) is None
    assert "do not read torch.float32" in str(linear_kernels.obstacle(weight.float()))
    assert "a multiple of 8, not 23" in str(linear_kernels.obstacle(weight[:, 1:]))
    assert "aligned to 16 bytes" in str(linear_kernels.obstacle(weight.flatten()[1:89].view(11, 8)))
    assert "contiguous" in str(linear_kernels.obstacle(weight[:, :16]))
    for tokens in (0, 33):
        x, y = torch.zeros(tokens, 24).half(), torch.zeros(tokens, 4).half()
        with pytest.raises(ValueError, match=f"1 to 32 tokens, not {tokens}"):
            linear_kernels.linear(Emulated(module), x, weight, None, y)
    x = torch.zeros(2, 24).half()
    for y in (torch.zeros(2, 4), torch.zeros(4, 2).half().t()):
        with pytest.raises(ValueError, match=r"write contiguous rows of torch\.float16, not torch\.float"):
            linear_kernels.linear(Emulated(module), x, weight, None, y)
