"""The lean path: the Llama family as plain functions over packed weights.

Llama, Mistral, Qwen2 and Qwen3: RMSNorm, rotary positions, grouped-query attention, SwiGLU. For small models
on a CPU the module tree of transformers costs more than the arithmetic; here a layer is about thirty calls.
On the CPU tokens run by spans (`span_layers`), whose logits depend, bit for bit, on their own sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from driftguard_engine.kernels import layers
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kv_cache import SlotCache, Span
from driftguard_engine.models.base import DecodesBySpans, Features
from driftguard_engine.models.linear import choose
from driftguard_engine.models.llama_weights import Layer, choose_ops, heads_of, layer_of, norm_of
from driftguard_engine.models.span_layers import SpanLayers


class LlamaModel(DecodesBySpans):
    """A model of the Llama family with its slot cache. See `TokenModel`."""

    path: Literal["lean", "generic"] = "lean"
    tree_obstacle: str | None = None

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
        self.heads = heads_of(config)
        self.hidden: int = config.hidden_size
        self.intermediate: int = config.intermediate_size
        self.embedding: Tensor = module.model.embed_tokens.weight.detach()
        self.dtype = self.embedding.dtype
        sizes = config.hidden_size, config.intermediate_size
        self._ops, self.kernels_obstacle = choose_ops(launcher, self.heads, *sizes, self.embedding)
        self._layers = []
        for layer in module.model.layers:
            self._layers.append(layer_of(layer, self.heads, self._ops))
            if emptied:
                layer.to("meta")
        self._final_norm = norm_of(module.model.norm)
        self._head = choose(module.lm_head.weight, getattr(module.lm_head, "bias", None), self._ops)
        self.layers = len(self._layers)
        rotary = module.model.rotary_emb
        self._spans = SpanLayers(self.heads, self.layers, slots, max_length + spare, rotary, self.embedding)

    def decode(
        self,
        token_ids: Tensor,
        starts: Tensor,
        slots: Tensor,
        counts: Sequence[int] | None = None,
        features: Features | None = None,
        parents: Sequence[tuple[int, ...]] | None = None,
    ) -> Tensor:
        """See `TokenModel`. Where the tensors are on the CPU, and of trees, they are read on the host.

        Else, and by kernels, nothing waits for a value and counts are not read: the call can be captured in a
        CUDA graph. Positions may then reach `spare` beyond max_length.
        """
        if parents is not None or self._reads_on_host(token_ids):
            return super().decode(token_ids, starts, slots, counts, features, parents)
        normed = self._decoded(token_ids, starts, slots, features)
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
    def _decoded(
        self, token_ids: Tensor, starts: Tensor, slots: Tensor, features: Features | None = None
    ) -> Tensor:
        """What the head reads of every token, [B * T, hidden]."""
        rows = self._spans.rows(slots, starts)
        hidden = self.embedding[token_ids.flatten()]  # [B * T, hidden]
        normed = self._ops.norm(hidden, self._layers[0].attention_norm)
        next_norms = [*(layer.attention_norm for layer in self._layers[1:]), self._final_norm]
        for index, (layer, next_norm) in enumerate(zip(self._layers, next_norms, strict=True)):
            if features is not None:
                features.take(index, hidden)
            hidden, widened = self._spans.decode(self._ops, index, layer, normed, hidden, rows)
            hidden, normed = self._ops.add_and_norm(hidden, widened, next_norm)
        if features is not None:
            features.take(self.layers, normed)
        return normed

    @torch.inference_mode()
    def forward(
        self, token_ids: Sequence[int], spans: Sequence[Span], features: Features | None = None
    ) -> Tensor:
        normed = self._final_norm.apply(self._hidden(token_ids, spans, features))
        if features is not None:
            features.take(self.layers, normed[: len(token_ids)])
        return self._head.apply(normed)[: len(token_ids)]  # [N, V]

    @torch.inference_mode()
    def prefill(
        self, token_ids: Sequence[int], spans: Sequence[Span], features: Features | None = None
    ) -> None:
        hidden = self._hidden(token_ids, spans, features)
        if features is not None and features.asks(self.layers):
            features.take(self.layers, self._final_norm.apply(hidden)[: len(token_ids)])

    @torch.inference_mode()
    def unembed(self, hidden: Tensor) -> Tensor:
        return self._head.apply(hidden)

    def keep(self, slots: Sequence[int], starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        self._spans.cache.keep(slots, starts, paths)

    def copy(self, source: int, span: Span) -> None:
        self._spans.cache.copy(source, span)

    @property
    def cache(self) -> SlotCache:
        return self._spans.cache

    @torch.inference_mode()
    def read_out(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of what any layer reads, [N, hidden], by the last norm and the head; on the CPU
        N >= MINIMUM_ROWS."""
        return self._head.apply(self._final_norm.apply(hidden))

    def top(self, count: int) -> Sequence[Layer]:
        """The last `count` layers."""
        return self._layers[self.layers - count :]

    @torch.inference_mode()
    def read_beside(self, hidden: Tensor, spans: Sequence[Span], top: Sequence[Layer]) -> Tensor:
        """Logits [N, V] of rows that are no tokens. hidden [N, hidden]: what the first of the last layers
        reads of them, for which `top` stands. Their keys and values are written at the places of the spans:
        behind a sequence, where its next tokens overwrite them before anything else reads them."""
        batch = self._spans.batch(spans)
        hidden = F.pad(hidden, (0, 0, 0, batch.rows - batch.tokens))
        for index, layer in enumerate(top, self.layers - len(top)):
            hidden = self._spans.run(index, layer, layer.attention_norm.apply(hidden), hidden, batch)
        return self.read_out(hidden)[: batch.tokens]

    def _hidden(self, token_ids: Sequence[int], spans: Sequence[Span], features: Features | None) -> Tensor:
        """What the final norm reads, [rows, hidden], rows = max(N, MINIMUM_ROWS)."""
        batch = self._spans.batch(spans)
        hidden = self.embedding[self._spans.filled(token_ids, batch)]
        for index, layer in enumerate(self._layers):
            if features is not None:
                features.take(index, hidden[: batch.tokens])
            hidden = self._spans.run(index, layer, layer.attention_norm.apply(hidden), hidden, batch)
        return hidden
