"""Drafting without a model: what followed the same few tokens earlier in the sequence.

Prompt lookup (Saxena 2023). Drafts are not sampled, so the distribution of each is a point mass.
"""

from __future__ import annotations

from collections.abc import Sequence

from driftguard_engine.drafters.base import DraftRow
from driftguard_engine.kv_cache import Span
from driftguard_engine.speculation import SpeculativeStep


class SuffixIndex:
    """Where each n-gram of one growing sequence last ended; constant work per token."""

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self._sizes = range(max_tokens, min_tokens - 1, -1)
        self._ends: dict[tuple[int, ...], int] = {}
        self._indexed = 0  # n-grams that end at or before this length are in the index

    def continuation(self, token_ids: Sequence[int], count: int) -> list[int]:
        """Up to count tokens that followed the most recent earlier match of the longest matching suffix.

        Where the match is so close to the end that fewer follow it, the tokens copied are copied again.
        """
        length = len(token_ids)
        self._extend(token_ids, length - 1)
        for size in self._sizes:
            end = self._ends.get(tuple(token_ids[length - size :])) if size < length else None
            if end is not None:
                period = length - end
                return [token_ids[end + offset % period] for offset in range(count)]
        return []

    def _extend(self, token_ids: Sequence[int], length: int) -> None:
        for end in range(self._indexed + 1, length + 1):
            for size in self._sizes:
                if size <= end:
                    self._ends[tuple(token_ids[end - size : end])] = end
        self._indexed = max(self._indexed, length)


class NgramDrafter:
    """See `Drafter`."""

    def __init__(self, min_tokens: int, max_tokens: int) -> None:
        self.min_tokens = min_tokens
        self.max_tokens = max_tokens
        self._indexes: dict[str, SuffixIndex] = {}

    def prefill(self, token_ids: Sequence[int], spans: Sequence[Span]) -> None:
        """Nothing to read: the index is built from the sequence itself at the first proposal."""

    def copy(self, source: int, span: Span) -> None:
        """Nothing was read."""

    def propose(self, rows: Sequence[DraftRow], step: SpeculativeStep) -> None:
        for row in rows:
            step.guess(row.index, self._continuation(row))

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)

    def _continuation(self, row: DraftRow) -> list[int]:
        index = self._indexes.get(row.request_id)
        if index is None:
            index = self._indexes[row.request_id] = SuffixIndex(self.min_tokens, self.max_tokens)
        return index.continuation(row.token_ids, row.count)
