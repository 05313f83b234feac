"""Drafts without a model, for a batch: what followed the same few tokens earlier in each sequence.

By a kernel the sequences stay on the device, and nothing is copied back. Prompt lookup (Saxena 2023).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftguard_engine.kernels.cuda.launcher import Launcher

SUFFIXES = {torch.int32: "int32", torch.int64: "int64"}

_LOOKUP_THREADS = 512  # as in csrc


def look_up(
    launcher: Launcher,
    token_ids: Tensor,
    slots: Tensor,
    lengths: Tensor,
    min_tokens: int,
    max_tokens: int,
    draft_tokens: Tensor,
) -> None:
    """`reference`, by a kernel, into draft_tokens: can be captured in a CUDA graph.

    token_ids: [S, N] int32 or int64, each row contiguous. slots: [B] int64. lengths: [B] int64, 0 .. N.
    draft_tokens: [B, K] int64, contiguous. 1 <= min_tokens <= max_tokens.
    """
    launcher.launch(
        f"look_up_ngrams_{SUFFIXES[token_ids.dtype]}",
        (len(slots), 1, 1),
        _LOOKUP_THREADS,
        [
            *(token_ids, np.int64(token_ids.stride(0)), slots, lengths, np.int32(min_tokens)),
            *(np.int32(max_tokens), np.int32(draft_tokens.shape[1]), draft_tokens),
        ],
    )


def reference(
    token_ids: Tensor, slots: Tensor, lengths: Tensor, min_tokens: int, max_tokens: int, drafts: int
) -> Tensor:
    """Draft tokens, int64 [B, K], K = drafts; -1 in rows without any. All tensors are on the CPU, and as in
    `look_up`.

    Takes the longest suffix of each row (of max_tokens at most, min_tokens at least) that also occurs
    earlier, and its most recent occurrence. A match near the end continues with the tokens that it has
    copied.
    """
    tokens = np.full((len(slots), drafts), -1, np.int64)
    sequences = token_ids.numpy()
    for row, (slot, length) in enumerate(zip(slots.tolist(), lengths.tolist(), strict=True)):
        copied = _continuation(sequences[slot, :length], min_tokens, max_tokens, drafts)
        tokens[row, : len(copied)] = copied
    return torch.from_numpy(tokens)


def _continuation(ids: NDArray[Any], min_tokens: int, max_tokens: int, count: int) -> NDArray[Any]:
    """Of one sequence: `count` tokens, or none."""
    length, end = len(ids), None
    ends = np.flatnonzero(ids[:-1] == ids[-1:]) + 1  # where the last tokens occurred earlier, ascending
    for size in range(1, max_tokens + 1):
        if not len(ends):
            break
        if size >= min_tokens:
            end = ends[-1]
        ends = ends[ends > size]
        ends = ends[ids[ends - 1 - size] == ids[length - 1 - size]]
    if end is None:
        return ids[:0]
    copied: NDArray[Any] = ids[end + np.arange(count) % (length - end)]
    return copied
