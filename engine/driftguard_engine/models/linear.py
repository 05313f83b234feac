"""Linear layers whose result for one row does not depend on the other rows.

BLAS libraries choose their kernel by the number of rows, so `F.linear` gives the same row other bits in
another batch (see He et al., "Defeating Nondeterminism in LLM Inference", 2025). oneDNN's kernel on packed
weights does not, from two rows on. `PackedLinear` relies on that, and `choose` checks it for every shape on
the machine it runs on. Where the check fails, rows are multiplied one at a time: slower, and logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from driftguard_engine.kernels import layers
from driftguard_engine.kernels.layer_kernels import LayerOps

MINIMUM_ROWS = 2
_PACKING_ROWS_HINT = 16
_CHECKED_ROWS = (2, 3, 4, 5, 6, 7, 8, 9, 12, 15, 16, 17, 24, 31, 32, 33, 40, 48, 63, 64)

logger = logging.getLogger(__name__)
_checked_shapes: dict[tuple[int, int, torch.dtype, bool, int], bool] = {}


class Linear(Protocol):
    """y = x W^T + b for x [N, in], with the operations that commonly follow."""

    def apply(self, x: Tensor) -> Tensor:
        """y, [N, out]."""
        ...

    def apply_into(self, x: Tensor, y: Tensor) -> None:
        """The first n columns of y, into y [N, n], rows at any stride."""
        ...

    def silu(self, x: Tensor) -> Tensor:
        """y * sigmoid(y)."""
        ...

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        """y * other, other [N, out]."""
        ...

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        """y + other, other [N, out]."""
        ...


class Gated(Protocol):
    """SwiGLU (Shazeer 2020): silu(x Wg^T + bg) * (x Wu^T + bu) for x [N, in], [N, I]."""

    def apply(self, x: Tensor) -> Tensor: ...


class PackedLinear:
    """oneDNN on packed weights; x must have at least MINIMUM_ROWS rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKING_ROWS_HINT)
        self._bias = bias
        self._unary = torch.ops.mkldnn._linear_pointwise.default
        self._binary = torch.ops.mkldnn._linear_pointwise.binary

    def __reduce__(self) -> tuple[type[PackedLinear], tuple[Tensor, Tensor | None]]:
        return PackedLinear, (self._weight.to_dense(), self._bias)  # packed weights cannot be pickled

    def apply(self, x: Tensor) -> Tensor:
        y: Tensor = self._unary(x, self._weight, self._bias, "none", [], "")
        return y

    def apply_into(self, x: Tensor, y: Tensor) -> None:
        y.copy_(self.apply(x)[:, : y.shape[1]])

    def silu(self, x: Tensor) -> Tensor:
        y: Tensor = self._unary(x, self._weight, self._bias, "swish", [], "")
        return y

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        y: Tensor = self._binary(x, other, self._weight, self._bias, "mul")
        return y

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        y: Tensor = self._binary(x, other, self._weight, self._bias, "add")
        return y


class PlainLinear:
    """All rows at once, by `LayerOps`: for devices where bits may depend on the batch."""

    def __init__(self, weight: Tensor, bias: Tensor | None, ops: LayerOps = layers) -> None:
        self._weight = weight
        self._bias = bias
        self._ops = ops

    def apply(self, x: Tensor) -> Tensor:
        return self._ops.linear(x, self._weight, self._bias)

    def apply_into(self, x: Tensor, y: Tensor) -> None:
        size = y.shape[1]
        self._ops.linear_into(x, self._weight[:size], None if self._bias is None else self._bias[:size], y)

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(self.apply(x))

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return self.apply(x) * other

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self.apply(x) + other


class RowwiseLinear(PlainLinear):
    """One row at a time, each from a fresh copy: memory alignment can change bits too."""

    def apply(self, x: Tensor) -> Tensor:
        return torch.cat([F.linear(row.clone(), self._weight, self._bias) for row in torch.split(x, 1)])

    def apply_into(self, x: Tensor, y: Tensor) -> None:
        y.copy_(self.apply(x)[:, : y.shape[1]])

    def silu(self, x: Tensor) -> Tensor:
        # Row by row again: the vector and the scalar exponential differ in the last bit.
        return torch.cat([F.silu(row.clone()) for row in torch.split(self.apply(x), 1)])


class AdaptedLinear:
    """A linear layer with a low-rank adapter (LoRA, Hu et al. 2021): y + x A^T B^T."""

    def __init__(self, base: Linear, a: Linear, b: Linear) -> None:
        """a: x A^T, b: x B^T; on the CPU of independent rows, as `choose` makes them."""
        self._base, self._a, self._b = base, a, b

    def apply(self, x: Tensor) -> Tensor:
        return self._b.plus(self._a.apply(x), self._base.apply(x))

    def apply_into(self, x: Tensor, y: Tensor) -> None:
        y.copy_(self.apply(x)[:, : y.shape[1]])

    def silu(self, x: Tensor) -> Tensor:
        return F.silu(self.apply(x))

    def times(self, x: Tensor, other: Tensor) -> Tensor:
        return self.apply(x) * other

    def plus(self, x: Tensor, other: Tensor) -> Tensor:
        return self._b.plus(self._a.apply(x), self._base.plus(x, other))


@dataclass(frozen=True, slots=True)
class GatedPair:
    """`Gated` with one linear layer for each factor."""

    gate: Linear
    up: Linear

    def apply(self, x: Tensor) -> Tensor:
        return self.up.times(x, self.gate.silu(x))


@dataclass(frozen=True, slots=True)
class GatedProduct:
    """`Gated` with one matrix product for both factors: half as many kernels to launch."""

    weight: Tensor  # [2 I, in]
    bias: Tensor | None  # [2 I]
    ops: LayerOps

    def apply(self, x: Tensor) -> Tensor:
        return self.ops.linear_gated(x, self.weight, self.bias)


def choose_gated(gate: nn.Linear, up: nn.Linear, ops: LayerOps) -> Gated:
    if gate.weight.device.type == "cpu":
        return GatedPair(choose(gate.weight, gate.bias, ops), choose(up.weight, up.bias, ops))
    bias = None if gate.bias is None else torch.cat([gate.bias, up.bias]).detach()
    return GatedProduct(torch.cat([gate.weight, up.weight]).detach(), bias, ops)


def choose(weight: Tensor, bias: Tensor | None, ops: LayerOps = layers) -> Linear:
    """The fastest layer for weight [out, in]; on the CPU one that keeps rows independent, else by `ops`."""
    weight = weight.detach().contiguous()
    bias = None if bias is None else bias.detach().contiguous()
    if weight.device.type != "cpu":
        return PlainLinear(weight, bias, ops)
    shape = (*weight.shape, weight.dtype, bias is None, torch.get_num_threads())
    if shape not in _checked_shapes:
        _checked_shapes[shape] = _packed_is_independent(weight, bias)
    # A weight that is not packed may be a page of a file, which others may write.
    return PackedLinear(weight, bias) if _checked_shapes[shape] else RowwiseLinear(weight.clone(), bias)


def _packed_is_independent(weight: Tensor, bias: Tensor | None) -> bool:
    try:
        independent = rows_are_independent(PackedLinear(weight, bias), weight)
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        logger.warning("packed linear layers are not available here (%s); rows run one by one", error)
        return False
    if not independent:
        logger.warning(
            "packed linear layer %s: a row's bits depend on the batch; rows run one by one",
            tuple(weight.shape),
        )
    return independent


def rows_are_independent(layer: Linear, weight: Tensor) -> bool:
    """True if every operation of the layer gives a row the same bits at all checked places and row counts."""
    out, inner = weight.shape
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_CHECKED_ROWS[-1], inner, generator=generator).to(weight.dtype)
    other = torch.randn(_CHECKED_ROWS[-1], out, generator=generator).to(weight.dtype)
    operations: tuple[Callable[[Tensor], Tensor], ...] = (
        lambda rows: layer.apply(x[rows]),
        lambda rows: layer.silu(x[rows]),
        lambda rows: layer.times(x[rows], other[rows]),
        lambda rows: layer.plus(x[rows], other[rows]),
    )
    everything = torch.arange(_CHECKED_ROWS[-1])
    for operation in operations:
        expected = operation(everything)
        for count in _CHECKED_ROWS:
            # Rolled, so that the same rows stand at other places.
            rows = everything.roll(count)[:count]
            if not torch.equal(operation(rows), expected[rows]):
                return False
    return True
