"""Linear layers of a few small shapes, and by how much kernels may differ from exact sums: rounding only."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from driftguard_engine.kernels import layer_launches, layers
from driftguard_engine.kernels import linear as linear_kernels
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.linear import DTYPES
from torch import Tensor

from tests.engine.kernels.layer_cases import assert_close, normal

__all__ = ["DTYPES", "Product"]


@dataclass(frozen=True)
class Product:
    """x [M, K], weight [N, K], bias [N]."""

    x: Tensor
    weight: Tensor
    bias: Tensor | None

    @classmethod
    def make(
        cls,
        shape: tuple[int, int, int],  # M, N, K
        dtype: torch.dtype,
        device: torch.device,
        with_bias: bool,
    ) -> Product:
        tokens, size, inner = shape
        x, weight, bias = (
            normal(seed, dtype, *of).to(device)
            for seed, of in ((11, (tokens, inner)), (12, (size, inner)), (13, (size,)))
        )
        return cls(x, weight, 8 * bias if with_bias else None)

    def __str__(self) -> str:
        bias = "no bias" if self.bias is None else "bias"
        return f"x {list(self.x.shape)}, weight {list(self.weight.shape)}, {bias}, {self.x.dtype}"

    def by_kernel(self, launcher: Launcher, x: Tensor) -> Tensor:
        """Into rows that do not follow one another."""
        room = x.new_full((len(x), 2, len(self.weight)), torch.nan)
        linear_kernels.linear(launcher, x, self.weight, self.bias, room[:, 0])
        assert bool(room[:, 1].isnan().all()), f"{self}: writes between the rows"
        return room[:, 0].contiguous()

    def gated_by_kernel(self, launcher: Launcher) -> Tensor:
        gated = self.x.new_full((len(self.x), len(self.weight) // 2), torch.nan)
        linear_kernels.linear_gated(launcher, self.x, self.weight, self.bias, gated)
        return gated

    def check(self, launcher: Launcher) -> None:
        """Against the exact product, within what its float32 sum and its rounding can lose."""
        x, weight = self.x.double(), self.weight.double()
        bias = weight.new_zeros(len(weight)) if self.bias is None else self.bias.double()
        exact, sizes = x @ weight.T + bias, x.abs() @ weight.T.abs() + bias.abs()
        roundings = self.x.shape[1] / 8 + 16  # of a sum: a warp's, those of the warps, the bias
        bound = 0.5 * torch.finfo(self.x.dtype).eps * exact.abs() + 2.0**-23 * roundings * sizes
        found = self.by_kernel(launcher, self.x)
        off = (found.double() - exact).abs() / bound
        assert bool((off <= 1).all()), f"{self}: {off.max():.2f} times what rounding explains"

    def check_rows(self, launcher: Launcher) -> None:
        """A token's bits are the same alone, among others and at another place."""
        found = self.by_kernel(launcher, self.x)
        turned = self.by_kernel(launcher, self.x.flip(0))
        assert torch.equal(turned.flip(0), found), f"{self}: a token's place changes its bits"
        for token in {0, len(self.x) // 2, len(self.x) - 1}:
            alone = self.by_kernel(launcher, self.x[token : token + 1].contiguous())
            assert torch.equal(alone[0], found[token]), f"{self}: token {token} depends on the others"

    def check_gated(self, launcher: Launcher) -> None:
        found, apart = self.gated_by_kernel(launcher), self.by_kernel(launcher, self.x)
        if found.shape[1] % 8:
            assert_close(found, layers.gate(apart), f"gated {self}")
            return
        gated = torch.empty_like(found)
        layer_launches.gate(launcher, apart, gated)
        assert torch.equal(found, gated), f"gated {self}: other bits than apart"


def whole_numbers(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    """From -3 to 3: sums of their products are exact, in any order."""
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
