from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from driftguard_engine.models import linear
from driftguard_engine.models.linear import (
    Linear,
    PackedLinear,
    PlainLinear,
    RowwiseLinear,
    choose,
    rows_are_independent,
)
from torch import Tensor
from torch.nn import functional as F

SHAPES = [(33, 50), (48, 80), (5, 7), (544, 192)]


@pytest.mark.parametrize("shape", SHAPES)
def test_the_chosen_layer_computes_the_linear_map_and_keeps_rows_independent(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, bias = torch.randn(shape, generator=generator), torch.randn(shape[0], generator=generator)
    x, other = torch.randn(9, shape[1], generator=generator), torch.randn(9, shape[0], generator=generator)
    layer, y = choose(weight, bias), F.linear(x, weight, bias)
    for got, expected in (
        (layer.apply(x), y),
        (layer.silu(x), F.silu(y)),
        (layer.times(x, other), y * other),
        (layer.plus(x, other), y + other),
    ):
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    assert rows_are_independent(layer, weight)


@pytest.mark.parametrize("of", [choose, PlainLinear, RowwiseLinear])
@pytest.mark.parametrize("with_bias", [True, False])
def test_the_first_outputs_can_be_written_between_others(of: Callable[..., Linear], with_bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    weight, x = torch.randn(33, 50, generator=generator), torch.randn(9, 50, generator=generator)
    bias = torch.randn(33, generator=generator) if with_bias else None
    for size in (33, 20):
        room = torch.zeros(9, 3, size)
        of(weight, bias).apply_into(x, room[:, 1])
        torch.testing.assert_close(room[:, 1], F.linear(x, weight, bias)[:, :size], rtol=1e-4, atol=1e-4)
        assert not room[:, ::2].any()


@pytest.mark.parametrize("shape", SHAPES)
def test_one_row_at_a_time_is_independent_by_nature(shape: tuple[int, int]) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    assert rows_are_independent(RowwiseLinear(weight, None), weight)


class _DependsOnTheBatch(PlainLinear):
    def apply(self, x: Tensor) -> Tensor:
        return super().apply(x) * (1 + 1e-6 * (x.shape[0] > 30))


def test_the_check_sees_a_layer_whose_rows_depend_on_the_batch() -> None:
    weight = torch.randn(48, 80, generator=torch.Generator().manual_seed(1))
    assert not rows_are_independent(_DependsOnTheBatch(weight, None), weight)


@pytest.mark.parametrize("fails", [False, True])
def test_where_the_fast_layer_is_not_independent_the_safe_one_serves_and_says_so(
    fails: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Unusable(_DependsOnTheBatch):
        def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
            if fails:
                raise RuntimeError("no such kernel")
            super().__init__(weight, bias)

    monkeypatch.setattr(linear, "PackedLinear", Unusable)
    monkeypatch.setattr(linear, "_checked_shapes", {})
    with caplog.at_level(logging.WARNING):
        layer = choose(torch.ones(4, 6), None)
    assert isinstance(layer, RowwiseLinear)
    assert not isinstance(layer, PackedLinear)
    assert "rows run one by one" in caplog.text
