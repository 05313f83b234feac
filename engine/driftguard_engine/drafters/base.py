"""What the engine asks of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from driftguard_engine.kv_cache import Span


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One sequence that wants up to `count` >= 1 draft tokens.

    index: its row in the batch's sampling tensors. token_ids: the whole sequence so far (read only), of which
    the first `prefilled` were read by `Drafter.prefill`.
    request_id: names the sequence over its life; slots are reused.
    """

    request_id: str
    slot: int
    index: int
    token_ids: Sequence[int]
    count: int
    prefilled: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters of the batch's B rows, each [B]."""

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seed: Tensor

    def rows(self, index: Tensor) -> Sampling:
        """Those of the rows in index [R]."""
        return Sampling(self.temperature[index], self.top_k[index], self.top_p[index], self.seed[index])


@dataclass(frozen=True, slots=True)
class Proposal:
    """Draft tokens of one sequence, and the raw logits [count, V] that they were drawn from."""

    token_ids: list[int]
    logits: Tensor


class Drafter(Protocol):
    """Guesses the next tokens of running sequences.

    Every drafted token is a draw from the law of its logits, under the row's own sampling and noise: that is
    what makes verification exact.
    """

    def prefill(self, token_ids: Sequence[int], spans: Sequence[Span]) -> None:
        """Reads prompt tokens (not each prompt's last one), as `TokenModel.prefill`."""
        ...

    def copy(self, source: int, span: Span) -> None:
        """As `TokenModel.copy`."""
        ...

    def propose(self, rows: Sequence[DraftRow], sampling: Sampling) -> list[Proposal]:
        """At most row.count tokens for every row, in order; fewer or none where it has no guess."""
        ...

    def forget(self, request_id: str) -> None:
        """The sequence has ended."""
        ...
