"""The interface of a model: logits for spans of tokens of several sequences."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

from torch import Tensor

from driftguard_engine.kv_cache import Span


class TokenModel(Protocol):
    """A causal language model with a slot cache of its own.

    On the CPU the logits of a span depend, bit for bit, on its own sequence alone: not on the other spans
    of the call, nor on the slot.
    """

    vocabulary: int
    max_length: int
    path: Literal["lean", "generic"]

    def forward(self, token_ids: Sequence[int], spans: Sequence[Span]) -> Tensor:
        """Writes keys and values of all tokens and returns their logits [N, V].

        token_ids: the tokens of the spans one after another, N = sum of counts; each span continues what
        its slot already holds up to `start`.
        """
        ...

    def prefill(self, token_ids: Sequence[int], spans: Sequence[Span]) -> None:
        """As `forward`, without logits."""
        ...

    def copy(self, source: int, span: Span) -> None:
        """Fills the span's positions from slot `source`, which holds the same tokens up to its end."""
        ...
