"""What predicts several places at once from one hidden state of the target, of which each position's is kept:
Medusa heads."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from driftguard_engine.kv_cache import SlotCache, Span
from driftguard_engine.models.base import TokenModel
from driftguard_engine.models.linear import MINIMUM_ROWS, choose
from driftguard_engine.models.medusa_head import Choices, MedusaHeads


class PlacesModel(ABC):
    """What a slot holds of a prompt can be copied to another slot, and be gone on with there."""

    def __init__(
        self, heads: int, choices: Choices, hidden: int, slots: int, room: int, like: Tensor
    ) -> None:
        """heads: places that are predicted. hidden: the size of the states. room: positions of a slot. like:
        has the device and the type."""
        self.heads, self.choices = heads, choices
        self._cache = SlotCache(slots, room, like.device, like.dtype)
        self._cache.add_layer(1, hidden, 0)  # the hidden states, as keys without values

    @abstractmethod
    def predictions(self, slots: Tensor, lengths: Tensor, drafted: Tensor) -> Iterator[Tensor]:
        """Of each place, from the next but one behind the state before the newest token on: logits [B, V], no
        finite ones where a row has no token there. Sequences of these lengths [B] in these slots [B], of
        which so many tokens [B] are drafted at most."""

    @torch.inference_mode()
    def keep(self, hidden: Tensor, slots: Tensor, positions: Tensor) -> None:
        """hidden [N, H]: of the target, at these positions [N] of these slots [N]."""
        states = self._cache.keys[0]
        states[self._cache.rows(slots, positions).to(states.device), 0] = hidden

    def kept(self, slots: Tensor, positions: Tensor) -> Tensor:
        """[N, H]"""
        states = self._cache.keys[0]
        return states[self._cache.rows(slots, positions).to(states.device), 0]

    def copy(self, source: int, span: Span) -> None:
        self._cache.copy(source, span)


class MedusaModel(PlacesModel):
    """See `PlacesModel`."""

    def __init__(self, heads: MedusaHeads, target: TokenModel, slots: int, room: int) -> None:
        """room: positions of a slot."""
        self._target, layers = target, heads.config.layers
        each_head: list[Any] = [list(cast("Any", head)) for head in heads]
        self._blocks = [
            [choose(part.linear.weight, part.linear.bias) for part in head[:layers]] for head in each_head
        ]
        self._outputs = [choose(head[layers].weight, None) for head in each_head if heads.owns_output]
        hidden, like = target.embedding.shape[1], next(heads.parameters())
        super().__init__(len(heads), heads.config.choices, hidden, slots, room, like)

    def predictions(self, slots: Tensor, lengths: Tensor, _drafted: Tensor) -> Iterator[Tensor]:
        hidden = self.kept(slots, (lengths - 2).clamp(min=0))
        for head in range(self.heads):
            yield self.predict(head, hidden)

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
