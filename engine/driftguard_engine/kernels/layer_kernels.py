"""The functions of `layers` by kernels, used in place of the module: each result has memory of its own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from driftguard_engine.kernels import layer_launches, layers
from driftguard_engine.kernels import linear as linear_kernels
from driftguard_engine.kernels.cuda.launcher import SUFFIXES, Launcher
from driftguard_engine.kernels.layer_launches import AttentionScratch
from driftguard_engine.kernels.layers import KeysValues, Norm, Rows

MOST_TOKENS_BY_KERNEL = 16  # larger products are left to the library; the best bound was not measured yet


class LayerOps(Protocol):
    """The functions of `layers`."""

    def norm(self, x: Tensor, by: Norm, /) -> Tensor: ...
    def add_and_norm(self, x: Tensor, added: Tensor, by: Norm, /) -> tuple[Tensor, Tensor]: ...
    def rope_and_store_kv(
        self, qkv: Tensor, heads: int, head_norm: Norm | None, rows: Rows, cache: KeysValues, /
    ) -> Tensor: ...
    def attend(self, queries: Tensor, rows: Rows, cache: KeysValues, /) -> Tensor: ...
    def gate(self, gate_up: Tensor, /) -> Tensor: ...
    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, /) -> Tensor: ...
    def linear_into(self, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor, /) -> None: ...
    def linear_gated(self, x: Tensor, weight: Tensor, bias: Tensor | None, /) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class LayerKernels:
    """See `LayerOps`, for shapes without an `obstacle`."""

    launcher: Launcher

    def norm(self, x: Tensor, by: Norm) -> Tensor:
        normed = torch.empty_like(x)
        layer_launches.norm(self.launcher, x, by, normed)
        return normed

    def add_and_norm(self, x: Tensor, added: Tensor, by: Norm) -> tuple[Tensor, Tensor]:
        total, normed = torch.empty_like(x), torch.empty_like(x)
        layer_launches.add_and_norm(self.launcher, x, added, by, total, normed)
        return total, normed

    def rope_and_store_kv(
        self, qkv: Tensor, heads: int, head_norm: Norm | None, rows: Rows, cache: KeysValues
    ) -> Tensor:
        batch, dim = len(rows.slots), cache.keys.shape[-1]
        queries = qkv.new_empty(batch, qkv.shape[0] // batch, heads, dim)
        layer_launches.rope_and_store_kv(self.launcher, qkv, heads, head_norm, rows, cache, queries)
        return queries

    def attend(self, queries: Tensor, rows: Rows, cache: KeysValues) -> Tensor:
        batch, tokens, heads, dim = queries.shape
        scratch = AttentionScratch.empty(batch * tokens, heads, dim, cache.length, queries.device)
        mixed = queries.new_empty(batch * tokens, heads * dim)
        layer_launches.attend(self.launcher, queries, rows, cache, scratch, mixed)
        return mixed

    def gate(self, gate_up: Tensor) -> Tensor:
        gated = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
        layer_launches.gate(self.launcher, gate_up, gated)
        return gated

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not _reads_weights_once(x, weight):
            return layers.linear(x, weight, bias)
        y = x.new_empty(len(x), len(weight))
        linear_kernels.linear(self.launcher, x.contiguous(), weight, bias, y)
        return y

    def linear_into(self, x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
        if _reads_weights_once(x, weight):
            linear_kernels.linear(self.launcher, x.contiguous(), weight, bias, y)
        else:
            layers.linear_into(x, weight, bias, y)

    def linear_gated(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if not _reads_weights_once(x, weight):
            return self.gate(layers.linear(x, weight, bias))
        gated = x.new_empty(len(x), len(weight) // 2)
        linear_kernels.linear_gated(self.launcher, x.contiguous(), weight, bias, gated)
        return gated


def _reads_weights_once(x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels of `linear` compute this product; torch's library computes the others."""
    return len(x) <= MOST_TOKENS_BY_KERNEL and linear_kernels.obstacle(weight) is None


def obstacle(dtype: torch.dtype, hidden: int, intermediate: int, head_dim: int) -> str | None:
    """Why the kernels cannot compute layers of this shape."""
    if dtype not in SUFFIXES:
        return f"the kernels of a layer do not read {dtype}"
    if hidden % 8 or intermediate % 8:
        return f"the kernels of a layer need sizes that are multiples of 8, not {hidden} and {intermediate}"
    if head_dim % 16 or head_dim > layer_launches.MOST_DIM:
        return (
            f"the kernels attend with head dimensions 16, 32, ... {layer_launches.MOST_DIM}, not {head_dim}"
        )
    return None
