"""The interface of a model: logits for spans of tokens of several sequences."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from driftguard_engine.kv_cache import Span


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

    def forward(self, token_ids: Sequence[int], spans: Sequence[Span]) -> Tensor:
        """Writes keys and values of all tokens and returns their logits [N, V].

        token_ids: the tokens of the spans one after another, N = sum of counts; each span continues what
        its slot already holds up to `start`.
        """
        ...

    def prefill(self, token_ids: Sequence[int], spans: Sequence[Span]) -> None:
        """As `forward`, without logits."""
        ...

    def decode(
        self, token_ids: Tensor, starts: Tensor, slots: Tensor, counts: Sequence[int] | None = None
    ) -> Tensor:
        """Logits [B, T, V] of token_ids [B, T]; row b continues slots[b] at position starts[b]. All int64.

        counts [B]: of each row only so many tokens are needed, 0 .. T; None: all. Whatever lies behind them
        has no meaning, and is left out where no row needs it.
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

    def copy(self, source: int, span: Span) -> None:
        """Fills the span's positions from slot `source`, which holds the same tokens up to its end."""
        ...


class DecodesBySpans(ABC):
    """`decode` and `decode_into` of a `TokenModel` by its `forward`: what is needed is computed, and nothing
    else; other logits are 0, or left as they are. All tensors but logits are read on the host."""

    @abstractmethod
    def forward(self, token_ids: Sequence[int], spans: Sequence[Span]) -> Tensor: ...

    def decode(
        self, token_ids: Tensor, starts: Tensor, slots: Tensor, counts: Sequence[int] | None = None
    ) -> Tensor:
        needed = [token_ids.shape[1]] * len(token_ids) if counts is None else counts
        logits = self._decoded_spans(token_ids, starts, slots, needed)
        if min(needed) == max(needed):
            return logits.view(len(needed), needed[0], -1)
        return pad_sequence(list(torch.split(logits, [*needed])), batch_first=True)

    def decode_into(
        self,
        logits: Tensor,
        token_ids: Tensor,
        chosen: Tensor | None,
        starts: Tensor,
        slots: Tensor,
        wanted: Sequence[bool] | None = None,
    ) -> None:
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
        self, token_ids: Tensor, starts: Tensor, slots: Tensor, needed: Sequence[int]
    ) -> Tensor:
        """Logits [N, V] of the first needed[b] tokens of each row, row after row."""
        places = zip(slots.tolist(), starts.tolist(), needed, strict=True)
        spans = [Span(slot, start, count) for slot, start, count in places if count]
        flat = [token for row, count in zip(token_ids.tolist(), needed, strict=True) for token in row[:count]]
        return self.forward(flat, spans)
