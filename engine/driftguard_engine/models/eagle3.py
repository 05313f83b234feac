"""An EAGLE-3 head with its slot cache (Li et al. 2025, arXiv:2503.01840).

At place i of a sequence it reads what the target's layers hold for token i, fused to one vector, and the
embedding of token i + 1, and predicts token i + 2. Where the target has not read token i yet, in a chain of
drafts, its own output of the place before stands for the fused vector.

Bits on the CPU: as in `span_layers`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from driftguard_engine.kernels import layers
from driftguard_engine.kv_cache import Span
from driftguard_engine.models.eagle3_head import Eagle3Head
from driftguard_engine.models.linear import MINIMUM_ROWS, choose
from driftguard_engine.models.llama_weights import heads_of, layer_of, norm_of
from driftguard_engine.models.span_layers import SpanBatch, SpanLayers

_LAYER, _FUSED = 0, 1  # of the cache


class Eagle3Model:
    """features: the layers of the target that it reads.

    The fused vectors are kept beside keys and values: whatever a slot holds of a prompt can be copied to
    another slot, and be gone on with there.
    """

    def __init__(
        self, head: Eagle3Head, token_ids: Tensor, embedding: Tensor, vocabulary: int, slots: int, room: int
    ) -> None:
        """As `read_head` gives the head and token_ids. embedding: the target's. room: positions of a slot."""
        config, layer = head.config, head.layers[0]
        heads, hidden = heads_of(config.layer), config.layer.hidden_size
        embeds = head.embed_tokens
        self.features = config.features
        self._embedding = embedding if embeds is None else embeds.weight.detach()
        self._input_norm = None if head.input_norm is None else norm_of(head.input_norm)
        self._feature_norms = [norm_of(each) for each in head.fc_norm or ()]
        self._fuse = choose(head.fc.weight, None)
        self._layer, self._hidden_norm = layer_of(layer, heads, layers), norm_of(layer.hidden_norm)
        self._norm, self._head = norm_of(head.norm), choose(head.lm_head.weight, None)
        self._adds_to_normed, self._gives_normed = config.norm_before_residual, config.norm_output
        self._token_ids, self._vocabulary = token_ids.to(embedding.device), vocabulary
        self._spans = SpanLayers(heads, 1, slots, room, head.rotary_emb, self._embedding)
        self._cache = self._spans.cache
        self._cache.add_layer(1, hidden, 0)  # the fused vectors, as keys without values

    @torch.inference_mode()
    def keep(self, features: Tensor, places: Tensor) -> None:
        """features [N, F]: of the target, for these rows [N] of the cache."""
        if self._input_norm is not None:
            features = self._input_norm.apply(features)
        if self._feature_norms:
            parts = features.chunk(len(self._feature_norms), -1)
            normed = [norm.apply(part) for norm, part in zip(self._feature_norms, parts, strict=True)]
            features = torch.cat(normed, -1)
        self._cache.keys[_FUSED][places, 0] = self._fuse.apply(_filled(features))[: len(places)]

    def places(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Rows of the cache."""
        return slots * self._cache.length + positions

    @torch.inference_mode()
    def read(self, token_ids: Sequence[int], spans: Sequence[Span], hidden: Tensor | None = None) -> Tensor:
        """Its output [N, hidden] at the places of the spans; writes their keys and values.

        token_ids: those behind these places. hidden [N, hidden]: what stands for the fused vectors; None:
        those that were kept.
        """
        batch = self._spans.batch(spans)
        if hidden is None:
            hidden = self._cache.keys[_FUSED][batch.places, 0]
        return self._run(self._spans.filled(token_ids, batch), _filled(hidden), batch)[: batch.tokens]

    def _run(self, token_ids: Tensor, hidden: Tensor, batch: SpanBatch) -> Tensor:
        embedded = self._layer.attention_norm.apply(self._embedding[token_ids])
        normed = self._hidden_norm.apply(hidden)
        residual = normed if self._adds_to_normed else hidden
        return self._spans.run(_LAYER, self._layer, torch.cat([embedded, normed], -1), residual, batch)

    @torch.inference_mode()
    def predict(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Of outputs [N, hidden]: logits [N, V], -inf for tokens that it has not, and what the next pass
        reads in place of the fused vectors, [N, hidden]."""
        normed = self._norm.apply(_filled(output))
        logits = normed.new_full((len(output), self._vocabulary), -torch.inf)
        logits[:, self._token_ids] = self._head.apply(normed)[: len(output)]
        return logits, normed[: len(output)] if self._gives_normed else output

    def copy(self, source: int, span: Span) -> None:
        self._cache.copy(source, span)


def _filled(rows: Tensor) -> Tensor:
    return F.pad(rows, (0, 0, 0, max(0, MINIMUM_ROWS - len(rows))))
