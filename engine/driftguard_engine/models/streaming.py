"""Streams of Speculative Streaming (Bhendawade et al. 2024, arXiv:2402.11131): rows beside the tokens of a
sequence, which the top layers of the target read with an adapter and predict later tokens of.

The paper reads them in the target's own pass. Here they run behind it, over its keys and values, so that the
pass of the tokens is the very same with them as without.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from driftguard_engine.kv_cache import Span
from driftguard_engine.models.linear import AdaptedLinear, choose
from driftguard_engine.models.llama import LlamaModel
from driftguard_engine.models.llama_weights import Layer
from driftguard_engine.models.medusa import PlacesModel
from driftguard_engine.models.streaming_adapter import StreamingAdapter


class StreamingModel(PlacesModel):
    """See `PlacesModel`. feature: the layer of the target whose hidden states it reads."""

    def __init__(self, adapter: StreamingAdapter, target: LlamaModel, slots: int, room: int) -> None:
        """room: positions of a slot."""
        config = adapter.config
        self._target, self._embeddings = target, adapter.embeddings
        self._top = [
            _adapted(layer, low) for layer, low in zip(target.top(config.layers), adapter.layers, strict=True)
        ]
        self.feature = target.layers - config.layers
        super().__init__(config.streams, config.choices, target.hidden, slots, room, adapter.embeddings)

    def predictions(self, slots: Tensor, lengths: Tensor, drafted: Tensor) -> Iterator[Tensor]:
        """Stream j stands for the token j behind the last one that the target has read: it has its position,
        and sees what that one saw, and the streams before. Its keys and values are where those of that token
        will be."""
        counts = torch.where(lengths >= 2, drafted, 0).clamp(max=self.heads)
        rows = counts.nonzero().flatten()
        if not len(rows):
            return
        wanted = counts[rows].tolist()
        ends = (lengths[rows] - 1).tolist()
        spans = [Span(*each) for each in zip(slots[rows].tolist(), ends, wanted, strict=True)]
        states = self.kept(slots[rows], lengths[rows] - 2)
        hidden = torch.cat(
            [state + self._embeddings[:count] for state, count in zip(states, wanted, strict=True)]
        )
        found = torch.split(self._target.read_beside(hidden, spans, self._top), wanted)
        for stream in range(max(wanted)):
            logits = found[0].new_full((len(slots), self._target.vocabulary), -torch.inf)
            for row, each in zip(rows.tolist(), found, strict=True):
                if stream < len(each):
                    logits[row] = each[stream]
            yield logits


def _adapted(layer: Layer, low: Any) -> Layer:
    read = [low[name] for name in ("q_proj", "k_proj", "v_proj")]
    a, b = torch.cat([each.A for each in read]), cast("Any", torch).block_diag(*(each.B for each in read))
    return replace(
        layer,
        qkv=AdaptedLinear(layer.qkv, choose(a, None), choose(b, None)),
        output=AdaptedLinear(layer.output, choose(low["o_proj"].A, None), choose(low["o_proj"].B, None)),
        down=AdaptedLinear(layer.down, choose(low["down_proj"].A, None), choose(low["down_proj"].B, None)),
    )
