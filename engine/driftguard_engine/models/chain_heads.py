"""A head that is read token after token, with its slot cache: EAGLE (Li et al. 2024, arXiv:2401.15077),
EAGLE-3 (Li et al. 2025, arXiv:2503.01840), MTP (DeepSeek-AI 2024, arXiv:2412.19437) and P-EAGLE (Hui et al.
2026, arXiv:2602.01469).

At place i of a sequence it reads what the target's layers hold for token i, as one vector, and the embedding
of token i + 1, and predicts token i + 2. Where the target has not read token i yet, in a chain of drafts, its
own output of the place before stands for that vector; P-EAGLE has a learned vector and a mask token for both,
so that all places of a chain are read at once.

Bits on the CPU: as in `span_layers`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kv_cache import SlotCache, Span
from driftguard_engine.models.eagle3_head import Eagle3Head
from driftguard_engine.models.fused_head import FusedHead
from driftguard_engine.models.linear import choose
from driftguard_engine.models.llama_weights import choose_ops, heads_of, layer_of, norm_of
from driftguard_engine.models.span_layers import SpanLayers, filled

Unembed = Callable[[Tensor], Tensor]  # logits [N, V] of what an output layer reads, [N, hidden]


class ChainModel(ABC):
    """features: the layers of the target that it reads.

    The vectors of the target's features are kept beside keys and values, as the last layer of the cache:
    whatever a slot holds of a prompt can be copied to another slot, and be gone on with there.
    """

    features: tuple[int, ...]
    decodes: bool = False  # whether there is `decode`
    kernels_obstacle: str | None = None  # why the kernels do not compute it there
    _cache: SlotCache

    @abstractmethod
    def _kept(self, features: Tensor) -> Tensor:
        """The vectors of features [N, F]: [N, hidden], N >= MINIMUM_ROWS."""

    @abstractmethod
    def read(self, token_ids: Sequence[int], spans: Sequence[Span], hidden: Tensor | None = None) -> Tensor:
        """Its output [N, hidden] at the places of the spans; writes their keys and values.

        token_ids: those behind these places. hidden [N, hidden]: what stands for the kept vectors; None:
        those that were kept.
        """

    def decode(
        self, token_ids: Tensor, starts: Tensor, slots: Tensor, hidden: Tensor | None = None
    ) -> Tensor:
        """As `read`, of T places of each row from starts [B] on: its output [B * T, hidden].

        token_ids [B, T]: those behind these places. hidden [B * T, hidden]. Nothing waits for a value: it can
        be captured in a CUDA graph.
        """
        raise NotImplementedError

    @abstractmethod
    def predict(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Of outputs [N, hidden]: logits [N, V], -inf for tokens that it has not, and what the next pass
        reads in place of the kept vectors, [N, hidden]."""

    @torch.inference_mode()
    def keep(self, features: Tensor, places: Tensor) -> None:
        """features [N, F]: of the target, for these rows [N] of the cache."""
        self._cache.keys[-1][places, 0] = self._kept(filled(features))[: len(places)]

    def places(self, slots: Tensor, positions: Tensor) -> Tensor:
        """Rows of the cache."""
        return self._cache.rows(slots, positions)

    def copy(self, source: int, span: Span) -> None:
        self._cache.copy(source, span)


class LeanChainModel(ChainModel):
    """See `ChainModel`: of layers of Llama or Qwen3."""

    def __init__(
        self,
        modules: Sequence[Any],
        config: Any,
        rotary: Any,
        embedding: Tensor,
        slots: int,
        room: int,
        launcher: Launcher | None = None,
    ) -> None:
        """modules: decoder layers of transformers, config: theirs. room: positions of a slot. launcher: of
        the CUDA kernels; without one there is no `decode`."""
        heads, self._embedding = heads_of(config), embedding
        sizes = config.hidden_size, config.intermediate_size
        self._ops, self.kernels_obstacle = choose_ops(launcher, heads, *sizes, embedding)
        self.decodes = launcher is not None
        self._layers = [layer_of(each, heads, self._ops) for each in modules]
        self._spans = SpanLayers(heads, len(self._layers), slots, room, rotary, embedding)
        self._cache = self._spans.cache
        self._cache.add_layer(1, config.hidden_size, 0)  # the kept vectors, as keys without values

    @abstractmethod
    def _entered(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """What the first layer's attention reads, and what its output is added to."""

    @torch.inference_mode()
    def read(self, token_ids: Sequence[int], spans: Sequence[Span], hidden: Tensor | None = None) -> Tensor:
        batch = self._spans.batch(spans)
        if hidden is None:
            hidden = self._cache.keys[-1][batch.places, 0]
        embedded = self._embedding[self._spans.filled(token_ids, batch)]
        read, output = self._entered(embedded, filled(hidden))
        for index, layer in enumerate(self._layers):
            output = self._spans.run(index, layer, read, output, batch)
            if index + 1 < len(self._layers):
                read = self._layers[index + 1].attention_norm.apply(output)
        return output[: batch.tokens]

    @torch.inference_mode()
    def decode(
        self, token_ids: Tensor, starts: Tensor, slots: Tensor, hidden: Tensor | None = None
    ) -> Tensor:
        rows = self._spans.rows(slots, starts)
        if hidden is None:
            positions = starts[:, None] + torch.arange(token_ids.shape[1], device=starts.device)
            hidden = self._cache.keys[-1][self.places(slots[:, None], positions).flatten(), 0]
        read, output = self._entered(self._embedding[token_ids.flatten()], hidden)
        for index, layer in enumerate(self._layers):
            if index:
                read = layer.attention_norm.apply(output)
            output, widened = self._spans.decode(self._ops, index, layer, read, output, rows)
            output = output + widened
        return output


class Eagle3Model(LeanChainModel):
    """See `ChainModel`."""

    def __init__(
        self,
        head: Eagle3Head,
        token_ids: Tensor,
        embedding: Tensor,
        unembed: Unembed,
        vocabulary: int,
        slots: int,
        room: int,
        launcher: Launcher | None = None,
    ) -> None:
        """As `read_head` gives the head and token_ids. embedding, unembed: as of `FusedModel`."""
        config, first = head.config, head.layers[0]
        own = head.embed_tokens
        embedding = embedding if own is None else own.weight.detach()
        super().__init__([*head.layers], config.layer, head.rotary_emb, embedding, slots, room, launcher)
        self.features = config.features
        self._input_norm = None if head.input_norm is None else norm_of(head.input_norm)
        self._feature_norms = [norm_of(each) for each in head.fc_norm or ()]
        self._fuse, self._hidden_norm = choose(head.fc.weight, None, self._ops), norm_of(first.hidden_norm)
        self._norm, output = norm_of(head.norm), head.lm_head
        self._unembed = unembed if output is None else choose(output.weight, None, self._ops).apply
        self._adds_to_normed, self._gives_normed = config.norm_before_residual, config.norm_output
        self._token_ids, self._vocabulary = token_ids.to(embedding.device), vocabulary

    def _kept(self, features: Tensor) -> Tensor:
        if self._input_norm is not None:
            features = self._input_norm.apply(features)
        if self._feature_norms:
            parts = features.chunk(len(self._feature_norms), -1)
            normed = [norm.apply(part) for norm, part in zip(self._feature_norms, parts, strict=True)]
            features = torch.cat(normed, -1)
        return self._fuse.apply(features)

    def _entered(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        normed = self._hidden_norm.apply(hidden)
        read = torch.cat([self._layers[0].attention_norm.apply(embedded), normed], -1)
        return read, normed if self._adds_to_normed else hidden

    @torch.inference_mode()
    def predict(self, output: Tensor) -> tuple[Tensor, Tensor]:
        normed = self._norm.apply(filled(output))
        logits = normed.new_full((len(output), self._vocabulary), -torch.inf)
        logits[:, self._token_ids] = self._unembed(normed)[: len(output)]
        return logits, normed[: len(output)] if self._gives_normed else output


class ParallelModel(Eagle3Model):
    """See `ChainModel`: P-EAGLE. mask_token_id: what it reads for a token that is not known yet."""

    def __init__(self, head: Eagle3Head, token_ids: Tensor, *given: Any) -> None:
        """As of `Eagle3Model`. Raises ValueError: the head has no mask."""
        super().__init__(head, token_ids, *given)
        if head.config.mask_token_id is None or head.mask_hidden is None:
            raise ValueError("the head has no mask")
        self.mask_token_id = head.config.mask_token_id
        self._mask = self._kept(filled(head.mask_hidden.detach()[0]))[0]

    def mask(self, places: Tensor) -> None:
        """The learned vector is what is kept of these rows of the cache, until the target's features are."""
        self._cache.keys[-1][places, 0] = self._mask


class FusedModel(LeanChainModel):
    """See `ChainModel`: MTP and EAGLE."""

    def __init__(
        self,
        head: FusedHead,
        embedding: Tensor,
        unembed: Unembed,
        slots: int,
        room: int,
        launcher: Launcher | None = None,
    ) -> None:
        """embedding, unembed: the target's; it gets MINIMUM_ROWS rows or more."""
        parts = head.parts
        super().__init__([parts.layer], head.layer_config, head.rotary_emb, embedding, slots, room, launcher)
        self.features, self._unembed, self._gives_normed = head.features, unembed, parts.feeds_normed
        self._fuse = choose(parts.fuse.weight, parts.fuse.bias, self._ops)
        self._token_norm, self._state_norm, self._norm = (
            norm_of(each) for each in (parts.token_norm, parts.state_norm, parts.output_norm)
        )

    def _kept(self, features: Tensor) -> Tensor:
        return features

    def _entered(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        read = [self._token_norm.apply(embedded), self._state_norm.apply(hidden)]
        fused = self._fuse.apply(torch.cat(read, -1))
        return self._layers[0].attention_norm.apply(fused), fused

    @torch.inference_mode()
    def predict(self, output: Tensor) -> tuple[Tensor, Tensor]:
        normed = self._norm.apply(filled(output))
        logits = self._unembed(normed)[: len(output)]
        return logits, normed[: len(output)] if self._gives_normed else output
