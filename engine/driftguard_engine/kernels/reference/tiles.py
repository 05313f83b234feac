"""Sums and maxima over a row of logits in one order, which the CUDA kernels follow addition by addition.

A tile is 2,048 elements: 8 chunks of 256. Float addition does not associate; here the order follows the
element's index alone, never the batch, the thread count or the machine's vector width.
"""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Number = TypeVar("Number", bound=np.floating[Any])

TILE = 2048
CHUNK = 256  # 32 lanes of a warp, 8 neighbouring elements each
LANES = 32
RUN = CHUNK // LANES
_CHUNKS = TILE // CHUNK


def tiles_of(size: int) -> int:
    """T: tiles in a row of this size."""
    return -(-size // TILE)


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


def tile_maxima(row: NDArray[Number]) -> NDArray[Number]:
    """[..., V] -> [..., T]. The order does not matter for a maximum."""
    maxima: NDArray[Number]
    if row.shape[-1] <= TILE:  # faster here than reduceat
        maxima = row.max(-1, keepdims=True)
    else:
        maxima = np.maximum.reduceat(row, np.arange(0, row.shape[-1], TILE), axis=-1)
    return maxima


def per_chunk(tiles: NDArray[Number], chunks: int) -> NDArray[Number]:
    """The value of a tile repeated for each of its chunks: [..., T] -> [..., C, 1]."""
    if tiles.shape[-1] == 1:
        return tiles[..., np.newaxis]
    return tiles.repeat(_CHUNKS, -1)[..., :chunks, np.newaxis]


def tile_sums(chunks: NDArray[Number]) -> NDArray[Number]:
    """[..., C, CHUNK] -> [..., ceil(C / 8)]: the chunks of a tile one after another, then the halves."""
    *outer, count, width = chunks.shape
    whole, rest = divmod(count, _CHUNKS)
    sums = np.empty((*outer, whole + (rest > 0), width), chunks.dtype)
    # Along any axis but the last numpy adds one after another.
    if whole:
        of_whole = chunks[..., : count - rest, :].reshape(*outer, whole, _CHUNKS, width)
        of_whole.sum(-2, out=sums[..., :whole, :])
    if rest:
        chunks[..., count - rest :, :].sum(-2, out=sums[..., whole, :])
    # The 8 neighbours that a lane reads are halved first, then the lanes.
    lanes = sums.reshape(-1, width // RUN, RUN).transpose(2, 1, 0)
    return _halved(lanes.reshape(width, -1)).reshape(sums.shape[:-1])


def lane_sums(chunks: NDArray[Number]) -> NDArray[Number]:
    """Of one whole tile, [..., 8, CHUNK] -> [..., 32]: what each lane adds up before the lanes are halved."""
    lanes = chunks.sum(-2).reshape(*chunks.shape[:-2], LANES, RUN)
    return _halved(lanes.T).T


def row_sum(tiles: NDArray[Number]) -> NDArray[Number]:
    """[..., T] -> [...]: every 32nd tile one after another, then the halves; few tiles take fewer lanes."""
    if tiles.shape[-1] == 1:
        return tiles[..., 0]
    rounds = _padded(tiles, min(LANES, 1 << (tiles.shape[-1] - 1).bit_length()), 0)
    total: NDArray[Number] = _halved(rounds.sum(-2).T).T
    return total


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
    """[2**n, ...] -> [...]: element i and element i + half, until one is left."""
    while (size := len(values)) > 1:
        values = values[: size // 2] + values[size // 2 :]
    last: NDArray[Number] = values[0]
    return last
