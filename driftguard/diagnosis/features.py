"""Token ids as vectors: hashed n-grams. No tokenizer and no model is needed; any captured request will do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

DIMENSIONS: Final = 256  # per length of n-gram
LENGTHS: Final = (1, 2)
NEWEST_TOKENS: Final = 2_048  # of a prompt: its end says most, and long contexts must not cost more

Floats = NDArray[np.float64]
_MULTIPLIERS: Final = np.array([0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F], dtype=np.uint64)
_BITS: Final = np.uint64(64 - (DIMENSIONS - 1).bit_length())


def features_of(prompts: Sequence[Sequence[int]]) -> Floats:
    """One row per prompt: [prompts, len(LENGTHS) * DIMENSIONS].

    Per length of n-gram: counts c in 256 hashed bins, then sqrt(c / sum c), so that the inner product of two
    rows is the Bhattacharyya coefficient of their n-gram frequencies. Different n-grams may share a bin: that
    hides a difference at worst, and never makes one.
    Paper: Weinberger et al., Feature hashing for large scale multitask learning (ICML 2009).
    """
    rows = np.zeros((len(prompts), len(LENGTHS) * DIMENSIONS))
    for row, prompt in zip(rows, prompts, strict=True):
        tokens = np.asarray(prompt[-NEWEST_TOKENS:], dtype=np.uint64)
        for place, length in enumerate(LENGTHS):
            counts = np.bincount(_bins(tokens, length), minlength=DIMENSIONS)
            total = max(int(counts.sum()), 1)
            row[place * DIMENSIONS : (place + 1) * DIMENSIONS] = np.sqrt(counts / total)
    return rows


def _bins(tokens: NDArray[np.uint64], length: int) -> NDArray[np.int64]:
    """Multiplicative hashing: the top bits of sum_i m_i (token_i + 1), modulo 2^64."""
    count = max(len(tokens) - length + 1, 0)
    mixed = np.zeros(count, dtype=np.uint64)
    for offset in range(length):
        mixed += (tokens[offset : offset + count] + np.uint64(1)) * _MULTIPLIERS[offset]
    mixed ^= mixed >> np.uint64(29)
    bins: NDArray[np.int64] = ((mixed * _MULTIPLIERS[0]) >> _BITS).astype(np.int64)
    return bins
