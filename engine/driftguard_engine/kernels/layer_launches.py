"""The functions of `layers` by kernels, into memory that the caller brings: can be captured in a CUDA graph.

Tensors are contiguous, aligned to 16 bytes and of one dtype out of `SUFFIXES`; those of `Rows` have their
own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from driftguard_engine.kernels.cuda.launcher import SUFFIXES, Argument, Launcher
from driftguard_engine.kernels.layers import KeysValues, Norm, Rows
from driftguard_engine.kernels.reference.tiles import CHUNK, LANES, RUN

_MOST_THREADS, _TURN_THREADS, _GATE_THREADS, _ATTEND_THREADS = 1024, 128, 256, 128  # as in csrc
_SPLIT, _ROW_TILE = 256, 16  # likewise
MOST_DIM = 256  # of a head
_TENSOR_CORE_DIMS = (64, 128)
_BLOCKS_PER_PROCESSOR = 4  # two or three run at a time


def norm(launcher: Launcher, x: Tensor, by: Norm, normed: Tensor) -> None:
    """x, normed: [N, hidden], hidden a multiple of 8. Raises ValueError (another hidden)."""
    _add_and_norm(launcher, x, None, by, None, normed)


def add_and_norm(
    launcher: Launcher, x: Tensor, added: Tensor, by: Norm, total: Tensor, normed: Tensor
) -> None:
    """All [N, hidden], hidden a multiple of 8; total may be x. Raises ValueError (another hidden)."""
    _add_and_norm(launcher, x, added, by, total, normed)


def _add_and_norm(
    launcher: Launcher, x: Tensor, added: Tensor | None, by: Norm, total: Tensor | None, normed: Tensor
) -> None:
    rows, hidden = x.shape
    _expect_multiple("hidden", hidden, RUN)
    threads = min(_MOST_THREADS, -(-hidden // CHUNK) * LANES)  # one run per thread, in whole warps
    launcher.launch(
        f"add_and_norm_{SUFFIXES[x.dtype]}",
        (rows, 1, 1),
        threads,
        [x, added, by.weight, np.float32(by.epsilon), np.int32(hidden), total, normed],
    )


def rope_and_store_kv(
    launcher: Launcher,
    qkv: Tensor,  # [B * T, (H + 2 Hkv) * D]
    heads: int,
    head_norm: Norm | None,
    rows: Rows,
    cache: KeysValues,
    queries: Tensor,  # [B, T, H, D]
) -> None:
    """As `layers.rope_and_store_kv`, with its result in queries. A token beyond its slot's end is not stored.

    Raises ValueError (D is no multiple of 16).
    """
    _, kv_heads, dim = cache.keys.shape
    _expect_multiple("the head dimension", dim, 2 * RUN)
    tokens, all_heads = qkv.shape[0] // len(rows.slots), heads + 2 * kv_heads
    lanes_per_head = 1 << (dim // (2 * RUN) - 1).bit_length()
    launcher.launch(
        f"turn_and_store_{SUFFIXES[qkv.dtype]}",
        (qkv.shape[0], -(-all_heads * lanes_per_head // _TURN_THREADS), 1),
        _TURN_THREADS,
        [
            *(qkv, np.int32(tokens), np.int32(heads), np.int32(kv_heads), np.int32(dim)),
            np.int32(lanes_per_head),
            None if head_norm is None else head_norm.weight,
            np.float32(0 if head_norm is None else head_norm.epsilon),
            *(rows.slots, rows.starts, rows.cos, rows.sin, np.int32(len(rows.cos)), np.int32(cache.length)),
            *(cache.keys, cache.values, queries),
        ],
    )


def gate(launcher: Launcher, gate_up: Tensor, gated: Tensor) -> None:
    """gate_up [N, 2 I], gated [N, I], I a multiple of 8. Raises ValueError (another I)."""
    rows, size = gated.shape
    _expect_multiple("the size of the gate", size, RUN)
    launcher.launch(
        f"gate_{SUFFIXES[gate_up.dtype]}",
        (-(-rows * size // (RUN * _GATE_THREADS)), 1, 1),
        _GATE_THREADS,
        [gate_up, np.int32(rows), np.int32(size), gated],
    )


@dataclass(frozen=True, slots=True)
class AttentionScratch:
    """Memory for the partial results of split sequences, for one `attend` at a time."""

    values: Tensor  # float32
    maxima: Tensor  # float32
    sums: Tensor  # float32
    blocks: int  # that run at a time, at most; it changes no result

    @classmethod
    def empty(cls, tokens: int, heads: int, dim: int, length: int, device: torch.device) -> AttentionScratch:
        """For up to `tokens` = B * T of `heads` query heads in a cache of `length`."""
        count = tokens * heads * -(-length // _SPLIT)
        values, maxima, sums = (
            torch.empty(count * each, dtype=torch.float32, device=device) for each in (dim, 1, 1)
        )
        processors = 1
        if device.type == "cuda":
            processors = torch.cuda.get_device_properties(device).multi_processor_count
        return cls(values, maxima, sums, processors * _BLOCKS_PER_PROCESSOR)


def attend(
    launcher: Launcher,
    queries: Tensor,
    rows: Rows,
    cache: KeysValues,
    scratch: AttentionScratch,
    mixed: Tensor,
) -> None:
    """queries [B, T, H, D], mixed [B * T, H * D]. A sequence ends where its slot does.

    A sequence's bits depend on T, H and Hkv, not on the batch. Raises ValueError (D is no multiple of 16 up
    to 256, too small a scratch).
    """
    (batch, tokens, heads, dim), kv_heads = queries.shape, cache.keys.shape[1]
    _expect_multiple("the head dimension", dim, 2 * RUN)
    splits, suffix = -(-cache.length // _SPLIT), SUFFIXES[queries.dtype]
    if dim > MOST_DIM:
        raise ValueError(f"the kernels attend with head dimensions up to {MOST_DIM}, not {dim}")
    if scratch.values.numel() < queries.numel() * splits:
        raise ValueError(f"the scratch of attention is too small for {batch} x {tokens} tokens")
    scale = np.float32(math.log2(math.e) / math.sqrt(dim))
    by_tensor_cores = dim in _TENSOR_CORE_DIMS and queries.dtype != torch.float32
    group = heads // kv_heads
    folded = tokens * group
    tiles = 1 if folded <= _ROW_TILE else 2 if folded <= 2 * _ROW_TILE else 4  # of a block
    partial = [scratch.values, scratch.maxima, scratch.sums]
    counts = (batch, tokens, group, kv_heads, dim, cache.length)
    shape: list[Argument] = [np.int32(count) for count in counts]
    launcher.launch(
        f"attend_{dim}_{suffix}" if by_tensor_cores else f"attend_by_fma_{suffix}",
        (min(batch * kv_heads * splits, scratch.blocks), 1, 1),
        _ATTEND_THREADS,
        [
            queries,
            cache.keys,
            cache.values,
            rows.slots,
            rows.starts,
            *shape,
            np.int32(tiles),
            scale,
            *partial,
            mixed,
        ],
    )
    if splits > 1:
        launcher.launch(
            f"combine_splits_{suffix}",
            (tokens * heads, batch, 1),
            _ATTEND_THREADS,
            [rows.starts, *shape, *partial, mixed],
        )


def _expect_multiple(what: str, size: int, of: int) -> None:
    if size % of:
        raise ValueError(f"the kernels need {what} to be a multiple of {of}, not {size}")
