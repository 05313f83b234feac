"""Layers of a few small shapes, and what kernels may differ in from the torch functions: roundings alone."""

from __future__ import annotations

import torch
from driftguard_engine.kernels import layer_launches, layers
from driftguard_engine.kernels.launches import SUFFIXES, Launcher
from driftguard_engine.kernels.layers import KeysValues, Norm, Rows
from torch import Tensor

DTYPES = list(SUFFIXES)
LENGTH, SLOTS = 40, 4
EPSILON = 1e-5


def assert_close(found: Tensor, known: Tensor, what: str) -> None:
    """Both round twice, and from sums that another order may leave a few float32 roundings apart: each of the
    two may then end one step further."""
    kind = torch.finfo(known.dtype)
    step = 2 * kind.eps + 2.0**-20
    bound = step * known.double().abs().clamp_min(kind.smallest_normal)
    off = (found.double() - known.double()).abs()
    assert bool((off <= bound).all()), f"{what}: {(off / bound).max():.2f} times what rounding explains"


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


def check_turn_and_store(
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
    known = layers.turn_and_store(qkv, heads, head_norm, rows, known_cache)
    queries = torch.empty(known.shape, dtype=dtype, device=device)
    layer_launches.turn_and_store(launcher, qkv, heads, head_norm, rows, cache, queries)
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
