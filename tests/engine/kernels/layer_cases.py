"""Layers of a few small shapes, and by how much kernels may differ from torch: by rounding only."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from driftguard_engine.kernels import layer_launches, layers
from driftguard_engine.kernels.cuda.launcher import SUFFIXES, Launcher
from driftguard_engine.kernels.layer_launches import AttentionScratch
from driftguard_engine.kernels.layers import KeysValues, Norm, Rows
from torch import Tensor

DTYPES = list(SUFFIXES)
LENGTH, SLOTS = 40, 4
EPSILON = 1e-5
# Query heads per key head, and numbers per head, of Llama 2 and 3, Mistral, Qwen2 and Qwen3 in every size.
MODEL_HEADS = [
    *((group, 128) for group in (1, 2, 3, 4, 5, 6, 7, 8, 12, 16)),
    *((group, 64) for group in (4, 7, 8)),
]


def assert_close(found: Tensor, known: Tensor, what: str) -> None:
    """Both round twice. Their sums may differ by a few float32 roundings, because of another order; then each
    rounding may end one step further. Of 16-bit numbers hardly any does."""
    kind = torch.finfo(known.dtype)
    step = 2 * kind.eps + 2.0**-20
    bound = step * known.double().abs().clamp_min(kind.smallest_normal)
    off = (found.double() - known.double()).abs()
    assert bool((off <= bound).all()), f"{what}: {(off / bound).max():.2f} times what rounding explains"
    apart = int((found != known).sum())
    assert kind.bits == 32 or apart <= 1 + known.numel() // 20, f"{what}: {apart} rounded elsewhere"


def normal(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def check_norm(launcher: Launcher, device: torch.device, rows: int, hidden: int, dtype: torch.dtype) -> None:
    x, added = (normal(seed, dtype, rows, hidden).to(device) for seed in (1, 2))
    by = Norm(normal(3, dtype, hidden).to(device), EPSILON)
    what = f"[{rows}, {hidden}] of {dtype}"
    normed, total = torch.empty_like(x), x.clone()
    layer_launches.norm(launcher, x, by, normed)
    assert_close(normed, by.apply(x), f"norm of {what}")
    layer_launches.add_and_norm(launcher, total, added, by, total, normed)  # in place
    known_total, known = layers.add_and_norm(x, added, by)
    assert torch.equal(total, known_total), f"sum of {what}"
    assert_close(normed, known, f"norm of the sum of {what}")
    alone = torch.empty_like(normed[:1])
    layer_launches.norm(launcher, known_total[-1:].contiguous(), by, alone)
    assert torch.equal(alone[0], normed[-1]), f"a row of {what} depends on the others"


def check_gate(launcher: Launcher, device: torch.device, rows: int, size: int, dtype: torch.dtype) -> None:
    gate_up = (4 * normal(4, dtype, rows, 2 * size)).to(device)
    gated = torch.empty(rows, size, dtype=dtype, device=device)
    layer_launches.gate(launcher, gate_up, gated)
    assert_close(gated, layers.gate(gate_up), f"gate of [{rows}, {2 * size}] of {dtype}")


def rows_at(starts: list[int], dim: int, dtype: torch.dtype, device: torch.device, length: int) -> Rows:
    """Slots out of order."""
    positions, half = torch.arange(length)[:, None], dim // 2
    angles = (positions * 100.0 ** (-torch.arange(half) / half)).repeat(1, 2)
    sin = angles.sin() * torch.cat([-torch.ones(half), torch.ones(half)])
    slots = torch.arange(len(starts)).flip(0)
    given = (slots, torch.tensor(starts), angles.cos().to(dtype), sin.to(dtype))
    return Rows(*(each.to(device) for each in given))


def check_rope_and_store_kv(
    launcher: Launcher,
    device: torch.device,
    shape: tuple[int, int, int, int],  # T, H, Hkv, D
    dtype: torch.dtype,
    with_head_norm: bool,
) -> None:
    tokens, heads, kv_heads, dim = shape
    starts = [LENGTH - tokens, 0, 7]
    rows = rows_at(starts, dim, dtype, device, LENGTH)
    qkv = normal(5, dtype, len(starts) * tokens, (heads + 2 * kv_heads) * dim).to(device)
    weight = normal(6, dtype, heads + kv_heads, dim).to(device)
    head_norm = Norm(weight, EPSILON) if with_head_norm else None
    before = normal(7, dtype, 2, SLOTS * LENGTH, kv_heads, dim).to(device)
    known_cache, cache = (KeysValues(before[0].clone(), before[1].clone(), LENGTH) for _ in range(2))
    known = layers.rope_and_store_kv(qkv, heads, head_norm, rows, known_cache)
    queries = torch.empty(known.shape, dtype=dtype, device=device)
    layer_launches.rope_and_store_kv(launcher, qkv, heads, head_norm, rows, cache, queries)
    what = f"of T, H, Hkv, D = {shape}, {dtype}"
    assert torch.equal(cache.values, known_cache.values), f"values {what}"
    if head_norm is None:
        assert torch.equal(queries, known), f"queries {what}"
        assert torch.equal(cache.keys, known_cache.keys), f"keys {what}"
    else:
        # A normed number that is one step further moves what it is turned into by as much, whatever is left.
        slack = 4 * torch.finfo(dtype).eps * qkv.abs().max() * weight.abs().max()
        assert bool(((queries - known).abs() <= slack).all()), f"queries {what}"
        assert bool(((cache.keys - known_cache.keys).abs() <= slack).all()), f"keys {what}"


@dataclass(frozen=True)
class Attending:
    """Sequences in slots out of order; NaN wherever a slot holds nothing yet, as anything may lie there."""

    queries: Tensor
    rows: Rows
    cache: KeysValues

    @classmethod
    def make(
        cls,
        shape: tuple[int, int, int, int],  # T, H, Hkv, D
        starts: list[int],
        length: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Attending:
        tokens, heads, kv_heads, dim = shape
        rows = rows_at(starts, dim, dtype, device, length)
        keys, values = (
            normal(seed, dtype, len(starts) + 1, length, kv_heads, dim).to(device) for seed in (8, 9)
        )
        for cached in (keys, values):
            cached[-1] = torch.nan
            for slot, start in zip(rows.slots, starts, strict=True):
                cached[slot, start + tokens :] = torch.nan
        cache = KeysValues(keys.flatten(0, 1), values.flatten(0, 1), length)
        return cls(normal(10, dtype, len(starts), tokens, heads, dim).to(device), rows, cache)

    def of(self, row: int) -> Attending:
        rows = replace(
            self.rows, slots=self.rows.slots[row : row + 1], starts=self.rows.starts[row : row + 1]
        )
        return replace(self, queries=self.queries[row : row + 1].contiguous(), rows=rows)

    def by_kernels(self, launcher: Launcher, blocks: int) -> Tensor:
        batch, tokens, heads, dim = self.queries.shape
        device = self.queries.device
        scratch = AttentionScratch.empty(batch * tokens, heads, dim, self.cache.length, device)
        mixed = torch.full((batch * tokens, heads * dim), torch.nan, dtype=self.queries.dtype, device=device)
        layer_launches.attend(
            launcher, self.queries, self.rows, self.cache, replace(scratch, blocks=blocks), mixed
        )
        return mixed

    def known(self) -> tuple[Tensor, Tensor]:
        """The exact result, and that of the values' absolute sizes."""
        keys, values = (each.double().nan_to_num() for each in (self.cache.keys, self.cache.values))
        both = (KeysValues(keys, each, self.cache.length) for each in (values, values.abs()))
        exact, sizes = (layers.attend(self.queries.double(), self.rows, cache) for cache in both)
        return exact, sizes


def check_attend(launcher: Launcher, given: Attending, blocks: int = 5) -> None:
    """Against the exact answer: weights are rounded, so is their sum, and so is what comes out. Scores are
    float32 sums of as many products as a head has numbers: off by about their root, times sizes up to 5."""
    batch, tokens, heads, dim = given.queries.shape
    found = given.by_kernels(launcher, blocks)
    what = f"starts {given.rows.starts.tolist()}, {heads} heads of {dim}, {found.dtype}"
    exact, sizes = given.known()
    bound = (1.5 * torch.finfo(found.dtype).eps + dim**0.5 * 2.0**-22) * sizes
    off = (found.double() - exact).abs() / bound
    assert bool((off <= 1).all()), f"{what}: {off.max():.2f} times what rounding explains"
    alone = given.of(batch - 1).by_kernels(launcher, 1)
    assert torch.equal(alone, found[-tokens:]), f"{what}: the last row depends on the others or on the grid"
