"""Medusa heads, computed on the target's last hidden states, of which each position's is kept."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from driftguard_engine.kv_cache import SlotCache, Span
from driftguard_engine.models.base import TokenModel
from driftguard_engine.models.linear import MINIMUM_ROWS, choose
from driftguard_engine.models.medusa_head import MedusaHeads


class MedusaModel:
    """What a slot holds of a prompt can be copied to another slot, and be gone on with there."""

    def __init__(self, heads: MedusaHeads, target: TokenModel, slots: int, room: int) -> None:
        """room: positions of a slot."""
        self._target, layers = target, heads.config.layers
        each_head: list[Any] = [list(cast("Any", head)) for head in heads]
        self._blocks = [
            [choose(part.linear.weight, part.linear.bias) for part in head[:layers]] for head in each_head
        ]
        self._outputs = [choose(head[layers].weight, None) for head in each_head if heads.owns_output]
        self.heads, self.choices = len(heads), heads.config.choices
        like = next(heads.parameters())
        self._cache = SlotCache(slots, room, like.device, like.dtype)
        self._cache.add_layer(1, target.embedding.shape[1], 0)  # the hidden states, as keys without values

    @torch.inference_mode()
    def keep(self, hidden: Tensor, slots: Tensor, positions: Tensor) -> None:
        """hidden [N, H]: of the target, at these positions [N] of these slots [N]."""
        states = self._cache.keys[0]
        states[(slots * self._cache.length + positions).to(states.device), 0] = hidden

    def kept(self, slots: Tensor, positions: Tensor) -> Tensor:
        """[N, H]"""
        states = self._cache.keys[0]
        return states[(slots * self._cache.length + positions).to(states.device), 0]

    @torch.inference_mode()
    def predict(self, head: int, hidden: Tensor) -> Tensor:
        """Logits [N, V] of head number `head` for hidden states [N, H]: of the token head + 2 behind them."""
        count = len(hidden)
        hidden = F.pad(hidden, (0, 0, 0, max(0, MINIMUM_ROWS - count)))
        for block in self._blocks[head]:
            hidden = hidden + F.silu(block.apply(hidden))
        if self._outputs:
            return self._outputs[head].apply(hidden)[:count]
        return self._target.unembed(hidden)[:count]

    def copy(self, source: int, span: Span) -> None:
        self._cache.copy(source, span)
