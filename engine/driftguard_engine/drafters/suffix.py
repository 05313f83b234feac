"""Drafting without a model: what followed the longest match of the sequence's end, in a corpus or in itself.

Suffix decoding (Oliaro et al. 2024, arXiv:2411.04975) for a chain of drafts. Drafts are not sampled, so the
distribution of each is a point mass, and how many there are depends on tokens that were emitted, never on a
token that was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

from driftguard_engine.drafters.base import DraftRow
from driftguard_engine.drafters.corpus import LONGEST_MATCH, Corpus, packed
from driftguard_engine.kv_cache import Span
from driftguard_engine.speculation import SpeculativeStep

# As in vLLM's suffix decoding.
MAX_SPEC_FACTOR = 1.0
MIN_TOKEN_PROB = 0.1
_TOKEN_BYTES = 4


class OwnText:
    """One growing sequence, and where its end occurred before."""

    def __init__(self) -> None:
        self._bytes = bytearray()
        self._length = 0

    def extend(self, token_ids: Sequence[int]) -> None:
        """token_ids: the whole sequence so far."""
        self._bytes += packed(token_ids[self._length :])
        self._length = len(token_ids)

    @property
    def tail(self) -> bytes:
        return bytes(self._bytes[-LONGEST_MATCH * _TOKEN_BYTES :])

    def longest_match(self) -> tuple[int, int]:
        """(tokens, up to LONGEST_MATCH, of the end that occurred before; where the last such place ends).
        (0, 0): not even the last token did."""
        fits, end, too_long = 0, 0, min(self._length - 1, LONGEST_MATCH) + 1
        while too_long - fits > 1:
            length = (fits + too_long) // 2
            place = self._last_place(length)
            if place is None:
                too_long = length
            else:
                fits, end = length, place + length
        return fits, end

    def _last_place(self, length: int) -> int | None:
        pattern, end = self._bytes[-length * _TOKEN_BYTES :], len(self._bytes) - 1
        while (found := self._bytes.rfind(pattern, 0, end)) >= 0:
            if found % _TOKEN_BYTES == 0:
                return found // _TOKEN_BYTES
            end = found + len(pattern) - 1
        return None


class SuffixDrafter:
    """See `Drafter`. corpus: None: only the sequence itself is searched."""

    def __init__(self, corpus: Corpus | None) -> None:
        self._corpus = corpus
        self._texts: dict[str, OwnText] = {}

    def prefill(self, token_ids: Sequence[int], spans: Sequence[Span]) -> None:
        """Nothing to read: the sequence itself is searched at each proposal."""

    def copy(self, source: int, span: Span) -> None:
        """Nothing was read."""

    def propose(self, rows: Sequence[DraftRow], step: SpeculativeStep) -> None:
        for row in rows:
            text = self._texts.setdefault(row.request_id, OwnText())
            step.guess(row.index, self.continuation(text, row.token_ids, row.count))

    def forget(self, request_id: str) -> None:
        self._texts.pop(request_id, None)

    def continuation(self, text: OwnText, token_ids: Sequence[int], count: int) -> list[int]:
        """Up to count tokens, at most MAX_SPEC_FACTOR times the length of the match. text: of this sequence.

        A match in the sequence itself goes before one in the corpus that is no longer.
        """
        text.extend(token_ids)
        own, end = text.longest_match()
        tail = text.tail
        match = None if self._corpus is None else self._corpus.longest_match(tail)
        if self._corpus is not None and match is not None and match.length > own:
            most = min(count, int(MAX_SPEC_FACTOR * match.length))
            return self._corpus.continuation(match, tail, most, MIN_TOKEN_PROB)
        period = len(token_ids) - end
        most = min(count, int(MAX_SPEC_FACTOR * own))
        return [token_ids[end + offset % period] for offset in range(most)]
