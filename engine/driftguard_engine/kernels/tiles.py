"""Sums and maxima over a row of logits in one order, which the CUDA kernels follow addition by addition.

A tile is 4,096 elements: 16 chunks of 256. Float addition does not associate; here the order follows the
element's index alone, never the batch, the thread count or the machine's vector width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

TILE = 4096
CHUNK = 256  # 32 lanes of a warp, 8 neighbouring elements each
LANES = 32
RUN = CHUNK // LANES
_CHUNKS = TILE // CHUNK


def chunked(row: Tensor, value: float) -> Tensor:
    """[..., V] -> [..., C, CHUNK], `value` where the row has ended; a short row takes fewer lanes."""
    size = row.shape[-1]
    width = CHUNK if size > CHUNK // 2 else RUN << max(0, (size - 1) // RUN).bit_length()
    missing = -size % width
    return (F.pad(row, (0, missing), value=value) if missing else row).reshape(*row.shape[:-1], -1, width)


def clear_unread(chunks: Tensor, size: int) -> Tensor:
    """[..., C, CHUNK] of a row of `size`: runs that begin past its end become 0, in place."""
    read = size + -size % RUN
    if read < chunks.shape[-2] * chunks.shape[-1]:
        chunks.flatten(-2)[..., read:] = 0
    return chunks


def tile_maxima(chunks: Tensor) -> Tensor:
    """[..., C, CHUNK] -> [..., ceil(C / 16)]."""
    maxima = chunks.amax(-1)
    missing = -maxima.shape[-1] % _CHUNKS
    full = F.pad(maxima, (0, missing), value=-torch.inf)
    return full.view(*full.shape[:-1], -1, _CHUNKS).amax(-1)


def per_chunk(tiles: Tensor, chunks: int) -> Tensor:
    """What belongs to a tile, for each of its chunks: [..., T] -> [..., C, 1]."""
    return tiles.repeat_interleave(_CHUNKS, -1)[..., :chunks].unsqueeze(-1)


def tile_sums(chunks: Tensor) -> Tensor:
    """[..., C, CHUNK] -> [..., ceil(C / 16)]: the chunks of a tile one after another, then the halves."""
    sums = chunks[..., ::_CHUNKS, :].clone()
    for place in range(1, min(_CHUNKS, chunks.shape[-2])):
        addend = chunks[..., place::_CHUNKS, :]
        sums[..., : addend.shape[-2], :] += addend
    return _halved(_halved(sums.view(*sums.shape[:-1], -1, RUN)))


def row_sum(tiles: Tensor) -> Tensor:
    """[..., T] -> [...]: every 32nd tile one after another, then the halves."""
    rounds = F.pad(tiles, (0, -tiles.shape[-1] % LANES)).reshape(*tiles.shape[:-1], -1, LANES).unbind(-2)
    total = rounds[0]
    for addend in rounds[1:]:
        total = total + addend
    return _halved(total)


def tile_of(row: Tensor, tile: Tensor, value: float) -> Tensor:
    """Tile number tile[b] of row b, `value` where the row has ended: [B, V], [B] -> [B, min(V, TILE)]."""
    size = row.shape[-1]
    if size <= TILE:
        return row
    column = tile.unsqueeze(1) * TILE + torch.arange(TILE, device=row.device)
    return row.gather(1, column.clamp(max=size - 1)).masked_fill_(column >= size, value)


def _halved(values: Tensor) -> Tensor:
    """[..., 2**n] -> [...]: element i and element i + half, until one is left."""
    while (size := values.shape[-1]) > 1:
        values = values[..., : size // 2] + values[..., size // 2 :]
    return values.squeeze(-1)
