"""The functions of a Llama layer, for B rows of T tokens, in torch.

Shapes depend on the batch alone; the place and length of each row are read from tensors. So nothing here
waits for a value from the device, and all of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, slots=True)
class Norm:
    """RMSNorm over the last dimension, which is weight's last one (Zhang, Sennrich 2019)."""

    weight: Tensor
    epsilon: float

    def apply(self, x: Tensor) -> Tensor:
        if x.device.type == "cpu" and x.dtype == torch.float32:
            # The same bits: there torch does this in more operations, of which most of its time is overhead.
            return x * x.square().mean(-1, keepdim=True).add_(self.epsilon).rsqrt_() * self.weight
        return torch.rms_norm(x, self.weight.shape[-1:], None, self.epsilon) * self.weight


@dataclass(frozen=True, slots=True)
class Rows:
    """Where B rows of T tokens continue their sequences, and the rotation tables by position (RoPE)."""

    slots: Tensor  # [B] int64
    starts: Tensor  # [B] int64: position of each row's first token
    cos: Tensor  # [positions, D]
    sin: Tensor  # [positions, D]: rotated x = x * cos + roll(x, D / 2) * sin


@dataclass(frozen=True, slots=True)
class KeysValues:
    """One layer's cache: keys and values, both [slots * length, Hkv, D], a slot's rows one after another."""

    keys: Tensor
    values: Tensor
    length: int


def norm(x: Tensor, by: Norm) -> Tensor:
    """x [N, hidden], normalised."""
    return by.apply(x)


def add_and_norm(x: Tensor, added: Tensor, by: Norm) -> tuple[Tensor, Tensor]:
    """x + added, and that normalised: all [N, hidden]."""
    total = x + added
    return total, by.apply(total)


def rope_and_store_kv(
    qkv: Tensor,  # [B * T, (H + 2 Hkv) * D]
    heads: int,
    head_norm: Norm | None,  # of queries and keys: weight [H + Hkv, D]
    rows: Rows,
    cache: KeysValues,
) -> Tensor:
    """Writes the keys and values of every token to the cache; the rotated queries, [B, T, H, D]."""
    batch, dim = len(rows.slots), cache.keys.shape[-1]
    kv_heads = cache.keys.shape[1]
    each = qkv.view(batch, -1, heads + 2 * kv_heads, dim)
    positions = rows.starts[:, None] + torch.arange(each.shape[1], device=qkv.device)  # [B, T]
    unrotated = each[:, :, : heads + kv_heads]
    if head_norm is not None:
        unrotated = head_norm.apply(unrotated)
    cos, sin = rows.cos[positions][:, :, None], rows.sin[positions][:, :, None]
    rotated = unrotated * cos + unrotated.roll(dim // 2, -1) * sin
    places = (rows.slots[:, None] * cache.length + positions).flatten()
    cache.keys.index_copy_(0, places, rotated[:, :, heads:].flatten(0, 1))
    cache.values.index_copy_(0, places, each[:, :, heads + kv_heads :].flatten(0, 1))
    return rotated[:, :, :heads]


def attend(queries: Tensor, rows: Rows, cache: KeysValues) -> Tensor:
    """Causal attention of queries [B, T, H, D] over their sequences so far: [B * T, H * D].

    Token t of row b sees positions 0 .. starts[b] + t of its slot.
    """
    batch, tokens, heads, dim = queries.shape
    keys, values = (
        each.view(-1, cache.length, *each.shape[1:])[rows.slots].transpose(1, 2)  # [B, Hkv, length, D]
        for each in (cache.keys, cache.values)
    )
    last = rows.starts[:, None] + torch.arange(tokens, device=queries.device)  # [B, T]
    seen = torch.arange(cache.length, device=queries.device) <= last[:, None, :, None]  # [B, 1, T, length]
    mixed = F.scaled_dot_product_attention(
        queries.transpose(1, 2), keys, values, attn_mask=seen, enable_gqa=heads != keys.shape[1]
    )
    return mixed.transpose(1, 2).reshape(batch * tokens, heads * dim)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x W^T + b: [N, in] by [out, in] -> [N, out]."""
    return F.linear(x, weight, bias)


def linear_into(x: Tensor, weight: Tensor, bias: Tensor | None, y: Tensor) -> None:
    """`linear`, into y [N, out], rows at any stride."""
    if bias is None:
        torch.mm(x, weight.t(), out=y)
    else:
        torch.addmm(bias, x, weight.t(), out=y)


def linear_gated(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The gate of `linear`: [N, in] by [2 I, in] -> [N, I]."""
    return gate(F.linear(x, weight, bias))


def gate(gate_up: Tensor) -> Tensor:
    """silu(first half) * second half: [N, 2 I] -> [N, I]."""
    first, second = gate_up.chunk(2, -1)
    return F.silu(first) * second
