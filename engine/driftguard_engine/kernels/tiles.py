"""Sums and maxima over a row of logits in one order, which the CUDA kernels follow addition by addition.

A tile is 4,096 elements: 16 chunks of 256. Float addition does not associate; here the order follows the
element's index alone, never the batch, the thread count or the machine's vector width.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", bound=np.floating[Any])

TILE = 4096
CHUNK = 256  # 32 lanes of a warp, 8 neighbouring elements each
LANES = 32
RUN = CHUNK // LANES
_CHUNKS = TILE // CHUNK


def chunked(row: NDArray[Number], value: float) -> NDArray[Number]:
    """[..., V] -> [..., C, CHUNK], `value` where the row has ended; a short row takes fewer lanes."""
    size = row.shape[-1]
    width = CHUNK if size > CHUNK // 2 else RUN << max(0, (size - 1) // RUN).bit_length()
    return _padded(row, width, value)


def clear_unread(chunks: NDArray[Number], size: int) -> NDArray[Number]:
    """[..., C, CHUNK] of a row of `size`: runs that begin past its end become 0, in place."""
    read = size + -size % RUN
    last, width = divmod(read, chunks.shape[-1])
    if last < chunks.shape[-2]:
        chunks[..., last, width:] = 0
    return chunks


def tile_maxima(chunks: NDArray[Number]) -> NDArray[Number]:
    """[..., C, CHUNK] -> [..., ceil(C / 16)]."""
    maxima: NDArray[Number] = chunks.max(-1)
    tiles: NDArray[Number] = _padded(maxima, _CHUNKS, -np.inf).max(-1)
    return tiles


def per_chunk(tiles: NDArray[Number], chunks: int) -> NDArray[Number]:
    """What belongs to a tile, for each of its chunks: [..., T] -> [..., C, 1]."""
    if tiles.shape[-1] == 1:
        return tiles[..., np.newaxis]
    return tiles.repeat(_CHUNKS, -1)[..., :chunks, np.newaxis]


def tile_sums(chunks: NDArray[Number]) -> NDArray[Number]:
    """[..., C, CHUNK] -> [..., ceil(C / 16)]: the chunks of a tile one after another, then the halves."""
    sums = chunks[..., ::_CHUNKS, :].copy()
    for place in range(1, min(_CHUNKS, chunks.shape[-2])):
        addend = chunks[..., place::_CHUNKS, :]
        sums[..., : addend.shape[-2], :] += addend
    return _halved(_halved(_padded(sums, RUN, 0)))


def row_sum(tiles: NDArray[Number]) -> NDArray[Number]:
    """[..., T] -> [...]: every 32nd tile one after another, then the halves."""
    rounds = _padded(tiles, LANES, 0)
    total = rounds[..., 0, :]
    for at in range(1, rounds.shape[-2]):
        total = total + rounds[..., at, :]
    return _halved(total)


def _padded(values: NDArray[Number], width: int, value: float) -> NDArray[Number]:
    """[..., N] -> [..., ceil(N / width), width]."""
    *outer, size = values.shape
    rows = -(-size // width)
    if rows * width != size:
        full = np.full((*outer, rows * width), value, values.dtype)
        full[..., :size] = values
        values = full
    return values.reshape(*outer, rows, width)


def _halved(values: NDArray[Number]) -> NDArray[Number]:
    """[..., 2**n] -> [...]: element i and element i + half, until one is left."""
    while (size := values.shape[-1]) > 1:
        values = values[..., : size // 2] + values[..., size // 2 :]
    return values[..., 0]
