"""Decoder layers of the Llama family over a slot cache, for spans of tokens of several sequences.

Bits on the CPU: all tokens of a call run through the linear layers as rows of one matrix [N, hidden], which
are independent by `linear`; norms and rotations act within a row with exactly rounded operations; attention
runs per span over exactly its own length. So what a span gives depends on its own sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from driftguard_engine.kernels import layers
from driftguard_engine.kernels.layer_kernels import LayerOps
from driftguard_engine.kv_cache import SlotCache, Span
from driftguard_engine.models.linear import MINIMUM_ROWS
from driftguard_engine.models.llama_weights import Heads, Layer, rotation
from driftguard_engine.upload import upload

_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class SpanBatch:
    """The spans of one call, N tokens together, filled up to max(N, MINIMUM_ROWS) rows."""

    spans: Sequence[Span]
    places: Tensor  # [N]: rows of the cache
    cos: Tensor  # [rows, 1, D]
    sin: Tensor
    masks: Sequence[Tensor | None]

    @property
    def tokens(self) -> int:
        return len(self.places)

    @property
    def rows(self) -> int:
        return len(self.cos)


class SpanLayers:
    """The cache and the rotations that layers of the same heads share."""

    def __init__(self, heads: Heads, layers: int, slots: int, room: int, rotary: Any, like: Tensor) -> None:
        """room: positions of a slot. rotary: of transformers. like: has the device and the type."""
        self._heads, self._device, self._dtype = heads, like.device, like.dtype
        self.cos, self.sin = rotation(rotary, room, heads.dim, like)
        self.cache = SlotCache(slots, room, like.device, like.dtype)
        for _ in range(layers):
            self.cache.add_layer(heads.keys, heads.dim, heads.dim)
        row_bytes = (heads.queries + heads.keys) * heads.dim * like.dtype.itemsize
        self._rows_are_aligned = row_bytes % _ALIGNMENT_BYTES == 0

    def batch(self, spans: Sequence[Span], *, causal: bool = True) -> SpanBatch:
        """causal: no token sees one behind it; else each sees its whole span too."""
        places = self.cache.places(spans)
        positions = [position for span in spans for position in span.positions]
        at = upload([*positions, *[0] * (MINIMUM_ROWS - len(positions))], self._device)
        masks = [self._mask(span) if causal else None for span in spans]
        return SpanBatch(spans, upload(places, self._device), self.cos[at, None], self.sin[at, None], masks)

    def store(self, index: int, layer: Layer, read: Tensor, places: Tensor) -> None:
        """Writes the keys and values of read [N, in] to these rows [N] of the cache; N >= 1."""
        positions = places % self.cache.length
        at = F.pad(positions, (0, max(0, MINIMUM_ROWS - len(places))))
        batch = SpanBatch([], places, self.cos[at, None], self.sin[at, None], [])
        self._stored(index, layer, layer.qkv.apply(read), batch)

    def filled(self, token_ids: Sequence[int], batch: SpanBatch) -> Tensor:
        """The tokens, on the device, and 0 in the rows that fill up: [rows]."""
        return upload([*token_ids, *[0] * (batch.rows - len(token_ids))], self._device)

    def run(self, index: int, layer: Layer, normed: Tensor, hidden: Tensor, batch: SpanBatch) -> Tensor:
        """The layer's output [rows, hidden]. normed [rows, in]: what attention reads; hidden [rows, hidden]:
        what its output is added to."""
        mixed = self._attend(index, layer, layer.qkv.apply(normed), batch)
        hidden = layer.output.plus(mixed, hidden)
        return layer.down.plus(layer.gated.apply(layer.mlp_norm.apply(hidden)), hidden)

    def rows(self, slots: Tensor, starts: Tensor) -> layers.Rows:
        """For `decode`: rows [B] that go on at these positions [B]."""
        return layers.Rows(slots, starts, self.cos, self.sin)

    def decode(
        self, ops: LayerOps, index: int, layer: Layer, normed: Tensor, hidden: Tensor, rows: layers.Rows
    ) -> tuple[Tensor, Tensor]:
        """As `run`, of T tokens of each row: two parts of the output [B * T, hidden], which are to be added.

        Shapes depend on the batch alone, and nothing waits for a value: it can be captured in a CUDA graph.
        """
        cache = layers.KeysValues(self.cache.keys[index], self.cache.values[index], self.cache.length)
        qkv, heads = layer.qkv.apply(normed), self._heads.queries
        queries = ops.rope_and_store_kv(qkv, heads, layer.head_norm, rows, cache)
        mixed = layer.output.apply(ops.attend(queries, rows, cache))
        hidden, normed = ops.add_and_norm(hidden, mixed, layer.mlp_norm)
        return hidden, layer.down.apply(layer.gated.apply(normed))

    def _stored(self, index: int, layer: Layer, qkv: Tensor, batch: SpanBatch) -> Tensor:
        """Writes the new keys and values and returns the rotated queries, [rows, H, D]."""
        split = self._heads.queries + self._heads.keys
        heads = qkv.view(qkv.shape[0], split + self._heads.keys, self._heads.dim)
        unrotated = heads[:, :split]  # queries and keys
        if layer.head_norm is not None:
            unrotated = layer.head_norm.apply(unrotated)
        rotated = unrotated * batch.cos + unrotated.roll(self._heads.dim // 2, -1) * batch.sin
        count = batch.tokens
        self.cache.keys[index].index_copy_(0, batch.places, rotated[:count, self._heads.queries :])
        self.cache.values[index].index_copy_(0, batch.places, heads[:count, split:])
        return rotated[:, : self._heads.queries]

    def _attend(self, index: int, layer: Layer, qkv: Tensor, batch: SpanBatch) -> Tensor:
        """Writes the new keys and values and returns the heads' outputs [rows, H * D]."""
        rotated = self._stored(index, layer, qkv, batch)
        outputs, first = [], 0
        for span, mask in zip(batch.spans, batch.masks, strict=True):
            queries = rotated[first : first + span.count]  # [T, H, D]
            outputs.append(self._attend_span(index, queries, span, mask))
            first += span.count
        if first < qkv.shape[0]:
            outputs.append(outputs[0].new_zeros(qkv.shape[0] - first, outputs[0].shape[1]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_span(self, index: int, queries: Tensor, span: Span, mask: Tensor | None) -> Tensor:
        """[T, H * D]; query heads of one key head are folded into its rows."""
        keys, values = self.cache.read(index, span)  # [end, Hkv, D]
        group = self._heads.queries // self._heads.keys
        if group > 1:
            queries = queries.view(span.count, self._heads.keys, group, self._heads.dim).transpose(0, 1)
            folded = queries.transpose(1, 2).reshape(1, self._heads.keys, group * span.count, self._heads.dim)
        else:
            folded = queries.transpose(0, 1)[None]
        if not self._rows_are_aligned:
            folded = folded.clone()
        mixed = F.scaled_dot_product_attention(
            folded, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], attn_mask=mask
        )  # [1, Hkv, G * T, D]
        by_head = mixed.view(self._heads.keys, group, span.count, self._heads.dim)
        return by_head.permute(2, 0, 1, 3).reshape(span.count, -1)

    def _mask(self, span: Span) -> Tensor | None:
        """Additive [G * T, end]: token t of the span sees positions up to start + t; of a tree, its way."""
        if span.count == 1:
            return None
        mask = torch.full((span.count, span.end), float("-inf"), dtype=self._dtype, device=self._device)
        if span.parents is None:
            mask.triu_(span.start + 1)
        else:
            mask[:, : span.start] = 0
            mask[:, span.start :][span.seen().to(mask.device)] = 0
        group = self._heads.queries // self._heads.keys
        return mask if group == 1 else mask.repeat(group, 1)


def filled(rows: Tensor) -> Tensor:
    """rows [N, in] with rows of 0 behind them, up to MINIMUM_ROWS."""
    return F.pad(rows, (0, 0, 0, max(0, MINIMUM_ROWS - len(rows))))
