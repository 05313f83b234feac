"""The lean path: the Llama family as plain functions over packed weights.

Llama, Mistral, Qwen2 and Qwen3: RMSNorm, rotary positions, grouped-query attention, SwiGLU. For small models
on a CPU the module tree of transformers costs more than the arithmetic; here a layer is about thirty calls.

Bits on the CPU: all tokens of a call run through the linear layers as rows of one matrix [N, hidden], which
are independent by `linear`; norms and rotations act within a row with exactly rounded operations; attention
runs per span over exactly its own length. So a span's logits depend on its own sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from driftguard_engine.kernels import layers
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.layer_kernels import LayerKernels, LayerOps, obstacle
from driftguard_engine.kernels.layer_self_test import failure
from driftguard_engine.kv_cache import SlotCache, Span
from driftguard_engine.models.base import DecodesBySpans
from driftguard_engine.models.linear import MINIMUM_ROWS, choose
from driftguard_engine.models.llama_weights import Layer, heads_of, layer_of, norm_of, rotation
from driftguard_engine.upload import upload

_ALIGNMENT_BYTES = 64


class LlamaModel(DecodesBySpans):
    """A model of the Llama family with its slot cache. See `TokenModel`."""

    path: Literal["lean", "generic"] = "lean"

    def __init__(
        self,
        module: Any,
        slots: int,
        max_length: int,
        spare: int = 0,
        launcher: Launcher | None = None,
        *,
        emptied: bool = False,
    ) -> None:
        """module: the loaded transformers model, which is not needed afterwards.

        spare: positions of a slot behind max_length, which drafts beyond it may write to. launcher: of the
        CUDA kernels for decoding; with None, or where `kernels_obstacle` names a reason, torch computes.
        emptied: each layer of the module is freed once it has been read, so that weights are never in memory
        twice.
        """
        config = module.config
        self.vocabulary: int = config.vocab_size
        self.max_length = max_length
        self._heads = heads_of(config)
        self._embedding: Tensor = module.model.embed_tokens.weight.detach()
        self._device, self.dtype = self._embedding.device, self._embedding.dtype
        self.kernels_obstacle: str | None = obstacle(
            self.dtype, config.hidden_size, config.intermediate_size, self._heads.dim
        )
        self._ops: LayerOps = layers
        if launcher is not None and self.kernels_obstacle is None:
            group = self._heads.queries // self._heads.keys
            self.kernels_obstacle = failure(launcher, self.dtype, group, self._heads.dim, self._device)
        if launcher is not None and self.kernels_obstacle is None:
            self._ops = LayerKernels(launcher)
        self._layers = []
        for layer in module.model.layers:
            self._layers.append(layer_of(layer, self._heads, self._ops))
            if emptied:
                layer.to("meta")
        self._final_norm = norm_of(module.model.norm)
        self._head = choose(module.lm_head.weight, getattr(module.lm_head, "bias", None), self._ops)
        room, dim = max_length + spare, self._heads.dim  # positions of a slot
        self._cos, self._sin = rotation(module.model.rotary_emb, room, dim, self._embedding)
        self._cache = SlotCache(slots, room, self._device, self.dtype)
        for _ in self._layers:
            self._cache.add_layer(self._heads.keys, dim, dim)
        row_bytes = (self._heads.queries + self._heads.keys) * dim * self.dtype.itemsize
        self._rows_are_aligned = row_bytes % _ALIGNMENT_BYTES == 0

    def decode(
        self, token_ids: Tensor, starts: Tensor, slots: Tensor, counts: Sequence[int] | None = None
    ) -> Tensor:
        """See `TokenModel`. Where the tensors are on the CPU, they are read there.

        Else, and by kernels, nothing waits for a value and counts are not read: the call can be captured in a
        CUDA graph. Positions may then reach `spare` beyond max_length.
        """
        if self._reads_on_host(token_ids):
            return super().decode(token_ids, starts, slots, counts)
        normed = self._decoded(token_ids, starts, slots)
        return self._head.apply(normed).view(*token_ids.shape, -1)

    def decode_into(
        self,
        logits: Tensor,
        token_ids: Tensor,
        chosen: Tensor | None,
        starts: Tensor,
        slots: Tensor,
        wanted: Sequence[bool] | None = None,
    ) -> None:
        """See `TokenModel` and `decode`."""
        if self._reads_on_host(token_ids):
            super().decode_into(logits, token_ids, chosen, starts, slots, wanted)
            return
        normed = self._decoded(token_ids, starts, slots)
        self._head.apply_into(normed if chosen is None else normed[chosen], logits)

    def _reads_on_host(self, token_ids: Tensor) -> bool:
        return token_ids.device.type == "cpu" and self._ops is layers

    @torch.inference_mode()
    def _decoded(self, token_ids: Tensor, starts: Tensor, slots: Tensor) -> Tensor:
        """What the head reads of every token, [B * T, hidden]."""
        rows = layers.Rows(slots, starts, self._cos, self._sin)
        hidden = self._embedding[token_ids.flatten()]  # [B * T, hidden]
        normed = self._ops.norm(hidden, self._layers[0].attention_norm)
        next_norms = [*(layer.attention_norm for layer in self._layers[1:]), self._final_norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            cache = layers.KeysValues(self._cache.keys[index], self._cache.values[index], self._cache.length)
            queries = self._ops.rope_and_store_kv(
                layer.qkv.apply(normed), self._heads.queries, layer.head_norm, rows, cache
            )
            mixed = layer.output.apply(self._ops.attend(queries, rows, cache))
            hidden, normed = self._ops.add_and_norm(hidden, mixed, layer.mlp_norm)
            widened = layer.down.apply(layer.gated.apply(normed))
            hidden, normed = self._ops.add_and_norm(hidden, widened, next_norm)
        return normed

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], spans: Sequence[Span]) -> Tensor:
        hidden = self._final_norm.apply(self._hidden(token_ids, spans))
        return self._head.apply(hidden)[: len(token_ids)]  # [N, V]

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int], spans: Sequence[Span]) -> None:
        self._hidden(token_ids, spans)

    def copy(self, source: int, span: Span) -> None:
        self._cache.copy(source, span)

    def _hidden(self, token_ids: Sequence[int], spans: Sequence[Span]) -> Tensor:
        count = len(token_ids)
        padding = [0] * max(0, MINIMUM_ROWS - count)
        places = upload(self._cache.places(spans), self._device)  # [N]
        positions = [position for span in spans for position in range(span.start, span.end)]
        at = upload(positions + padding, self._device)  # [rows], rows = max(N, MINIMUM_ROWS)
        cos, sin = self._cos[at, None], self._sin[at, None]  # [rows, 1, D]
        masks = [self._mask(span) for span in spans]
        hidden = self._embedding[upload([*token_ids, *padding], self._device)]  # [rows, hidden]
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv.apply(layer.attention_norm.apply(hidden))
            mixed = self._attend(index, layer, qkv, cos, sin, places, spans, masks)
            hidden = layer.output.plus(mixed, hidden)
            normed = layer.mlp_norm.apply(hidden)
            hidden = layer.down.plus(layer.gated.apply(normed), hidden)
        return hidden

    def _attend(
        self,
        index: int,
        layer: Layer,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        places: Tensor,
        spans: Sequence[Span],
        masks: Sequence[Tensor | None],
    ) -> Tensor:
        """Writes the new keys and values and returns the heads' outputs [rows, H * D]."""
        split = self._heads.queries + self._heads.keys
        heads = qkv.view(qkv.shape[0], split + self._heads.keys, self._heads.dim)
        unrotated = heads[:, :split]  # queries and keys
        if layer.head_norm is not None:
            unrotated = layer.head_norm.apply(unrotated)
        rotated = unrotated * cos + unrotated.roll(self._heads.dim // 2, -1) * sin
        count = places.shape[0]
        self._cache.keys[index].index_copy_(0, places, rotated[:count, self._heads.queries :])
        self._cache.values[index].index_copy_(0, places, heads[:count, split:])
        outputs, first = [], 0
        for span, mask in zip(spans, masks, strict=True):
            queries = rotated[first : first + span.count, : self._heads.queries]  # [T, H, D]
            outputs.append(self._attend_span(index, queries, span, mask))
            first += span.count
        if first < qkv.shape[0]:
            outputs.append(outputs[0].new_zeros(qkv.shape[0] - first, outputs[0].shape[1]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_span(self, index: int, queries: Tensor, span: Span, mask: Tensor | None) -> Tensor:
        """[T, H * D]; query heads of one key head are folded into its rows."""
        keys, values = self._cache.read(index, span)  # [end, Hkv, D]
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
        """Additive [G * T, end]: token t of the span sees positions up to start + t."""
        if span.count == 1:
            return None
        mask = torch.full((span.count, span.end), float("-inf"), dtype=self.dtype, device=self._device)
        mask.triu_(span.start + 1)
        group = self._heads.queries // self._heads.keys
        return mask if group == 1 else mask.repeat(group, 1)
