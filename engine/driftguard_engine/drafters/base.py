"""The interface of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from driftguard_engine.kv_cache import Span
from driftguard_engine.speculation import SpeculativeStep


@dataclass(frozen=True, slots=True)
class DraftRow:
    """One sequence that wants up to `count` >= 1 draft tokens.

    index: its row in the batch's step; ascending. token_ids: the whole sequence so far (read only), of which
    the first `prefilled` were read by `Drafter.prefill`.
    request_id: names the sequence over its life; slots are reused.
    """

    request_id: str
    slot: int
    index: int
    token_ids: Sequence[int]
    count: int
    prefilled: int


class Drafter(Protocol):
    """Guesses the next tokens of running sequences."""

    def prefill(self, token_ids: Sequence[int], spans: Sequence[Span]) -> None:
        """Reads prompt tokens (not each prompt's last one), as `TokenModel.prefill`."""
        ...

    def copy(self, source: int, span: Span) -> None:
        """As `TokenModel.copy`."""
        ...

    def propose(self, rows: Sequence[DraftRow], step: SpeculativeStep) -> None:
        """Puts at most row.count draft tokens of every row into the step; fewer where it has none."""
        ...

    def forget(self, request_id: str) -> None:
        """The sequence has ended."""
        ...
