"""The interface of a model: logits for spans of tokens of several sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from driftguard_engine.kv_cache import Span


class Features:
    """The hidden states of some layers that one pass of a target leaves for a drafter.

    Layer i stands for what layer i of the model reads, from 0 (the embeddings) on: element i of the
    `hidden_states` of transformers, and what vLLM and speculators call auxiliary layer i. Behind the last
    layer it is what the output layer reads, which the final norm has normalised.
    """

    def __init__(
        self,
        layers: Collection[int],
        exit_layer: int | None = None,
        at_exit: Callable[[Tensor], None] | None = None,
    ) -> None:
        """at_exit: gets what `exit_layer` reads, before this layer runs (not of a generic model)."""
        self._parts: dict[int, list[Tensor]] = {layer: [] for layer in layers}
        self._exit_layer, self._at_exit = exit_layer, at_exit

    def take(self, layer: int, hidden: Tensor) -> None:
        """hidden [N, H]: of the next N tokens of the pass. Kept where the layer is asked for."""
        if self.asks(layer):
            self._parts[layer].append(hidden)
        if layer == self._exit_layer and self._at_exit is not None:
            self._at_exit(hidden)

    def asks(self, layer: int) -> bool:
        return layer in self._parts

    def of(self, layers: Sequence[int]) -> Tensor:
        """Of all tokens of the pass, these layers side by side: [N, len(layers) * H]."""
        return torch.cat([torch.cat(self._parts[layer]) for layer in layers], dim=-1)


class TokenModel(Protocol):
    """A causal language model with a slot cache of its own.

    On the CPU the logits of a span depend, bit for bit, on its own sequence alone: not on the other spans
    of the call, nor on the slot.
    """

    vocabulary: int
    max_length: int
    dtype: torch.dtype  # of logits
    path: Literal["lean", "generic"]
    kernels_obstacle: str | None  # why the kernels cannot compute its layers
    tree_obstacle: str | None  # why it cannot read trees
    recurrent: bool  # whether it goes on from where it keeps a state alone
    layers: int
    hidden: int  # size of the hidden states
    embedding: Tensor  # [V or more, width]

    def forward(
        self, token_ids: Sequence[int], spans: Sequence[Span], features: Features | None = None
    ) -> Tensor:
        """Writes keys and values of all tokens and returns their logits [N, V].

        token_ids: the tokens of the spans one after another, N = sum of counts; each span continues what
        its slot already holds up to `start`. features: takes hidden states of the N tokens.
        """
        ...

    def prefill(
        self, token_ids: Sequence[int], spans: Sequence[Span], features: Features | None = None
    ) -> None:
        """As `forward`, without logits."""
        ...

    def unembed(self, hidden: Tensor) -> Tensor:
        """Logits [N, V] of what the output layer reads, [N, hidden]; N >= MINIMUM_ROWS. For drafts: what a
        model does to its logits behind that layer is left out."""
        ...

    def decode(
        self,
        token_ids: Tensor,
        starts: Tensor,
        slots: Tensor,
        counts: Sequence[int] | None = None,
        features: Features | None = None,
        parents: Sequence[tuple[int, ...]] | None = None,
    ) -> Tensor:
        """Logits [B, T, V] of token_ids [B, T]; row b continues slots[b] at position starts[b]. All int64.

        counts [B]: of each row only so many tokens are needed, 0 .. T; None: all. Whatever lies behind them
        has no meaning, and is left out where no row needs it. features: takes hidden states of the tokens
        that are needed, row after row. parents: the tokens needed of each row are a tree, see `Span`; all is
        read on the host.
        """
        ...

    def decode_into(
        self,
        logits: Tensor,
        token_ids: Tensor,
        chosen: Tensor | None,
        starts: Tensor,
        slots: Tensor,
        wanted: Sequence[bool] | None = None,
    ) -> None:
        """As `decode`, the first n logits of one token of each row, into logits [B, n], rows at any stride.

        chosen [B] int64: these tokens' places among all B * T, the last ones needed; None: T is 1.
        wanted [B]: the rows that need logits; None: all.
        """
        ...

    def keep(self, slots: Sequence[int], starts: Sequence[int], paths: Sequence[Sequence[int]]) -> None:
        """Of trees that were read, keeps the keys and values at these places, as `SlotCache.keep`."""
        ...

    def copy(self, source: int, span: Span) -> None:
        """Fills the span's positions from slot `source`, which holds the same tokens up to its end."""
        ...

    def share(self, slot: int) -> None:
        """Of a recurrent model: keeps the state behind what the slot has read, until the next such call. So
        far it can be copied, and be gone on with."""
        ...


def by_row(values: Tensor, counts: Sequence[int]) -> Tensor:
    """[N, X] of N tokens, row after row, as [B, T, X], T the largest count; 0 behind each row's own."""
    if min(counts) == max(counts):
        return values.view(len(counts), counts[0], -1)
    return pad_sequence(list(torch.split(values, [*counts])), batch_first=True)


class DecodesBySpans(ABC):
    """`decode` and `decode_into` of a `TokenModel` by its `forward`: what is needed is computed, and nothing
    else; other logits are 0, or left as they are. All tensors but logits are read on the host."""

    recurrent = False

    def share(self, _slot: int, /) -> None:  # noqa: B027 of keys and values there is nothing to be done
        """See `TokenModel.share`."""

    def _settle(self, _slots: Tensor, _starts: Tensor) -> None:  # noqa: B027 as there
        """All that these slots have read before these places is settled: what follows was drafted."""

    @abstractmethod
    def forward(
        self, token_ids: Sequence[int], spans: Sequence[Span], features: Features | None = None
    ) -> Tensor: ...

    def decode(
        self,
        token_ids: Tensor,
        starts: Tensor,
        slots: Tensor,
        counts: Sequence[int] | None = None,
        features: Features | None = None,
        parents: Sequence[tuple[int, ...]] | None = None,
    ) -> Tensor:
        self._settle(slots, starts)
        needed = [token_ids.shape[1]] * len(token_ids) if counts is None else counts
        return by_row(self._decoded_spans(token_ids, starts, slots, needed, features, parents), needed)

    def decode_into(
        self,
        logits: Tensor,
        token_ids: Tensor,
        chosen: Tensor | None,
        starts: Tensor,
        slots: Tensor,
        wanted: Sequence[bool] | None = None,
    ) -> None:
        if chosen is not None:  # else what is before are drafts
            self._settle(slots, starts)
        batch, width = token_ids.shape
        lasts = [0] * batch if chosen is None else [place % width for place in chosen.tolist()]
        wanting = [True] * batch if wanted is None else wanted
        needed = [last + 1 if wants else 0 for last, wants in zip(lasts, wanting, strict=True)]
        found = self._decoded_spans(token_ids, starts, slots, needed)
        rows = [row for row, count in enumerate(needed) if count]
        if len(rows) < len(found):
            ends = list(accumulate(needed))
            found = found[[ends[row] - 1 for row in rows]]
        if len(rows) == batch:
            logits.copy_(found[:, : logits.shape[1]])
        else:
            logits[rows] = found[:, : logits.shape[1]].to(logits)

    def _decoded_spans(
        self,
        token_ids: Tensor,
        starts: Tensor,
        slots: Tensor,
        needed: Sequence[int],
        features: Features | None = None,
        parents: Sequence[tuple[int, ...] | None] | None = None,
    ) -> Tensor:
        """Logits [N, V] of the first needed[b] tokens of each row, row after row."""
        places = zip(slots.tolist(), starts.tolist(), needed, parents or [None] * len(needed), strict=True)
        spans = [Span(slot, start, count, above) for slot, start, count, above in places if count]
        flat = [token for row, count in zip(token_ids.tolist(), needed, strict=True) for token in row[:count]]
        return self.forward(flat, spans, features)
