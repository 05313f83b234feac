"""What ended requests have emitted, to be looked up in by later ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from driftguard_engine.drafters.corpus import Corpus

PIECE = 4_096  # tokens


class PastOutputs:
    """The newest outputs, in pieces of up to PIECE tokens, each a corpus of its own: so an output is sorted
    among those of the newest piece only, and the oldest piece is dropped as a whole. An output of more tokens
    than a piece is cut. Used by the engine's thread only."""

    def __init__(self, most_tokens: int) -> None:
        """most_tokens: once there are as many, between seven eighths of them and all are kept."""
        self._most_tokens = most_tokens
        self._piece = min(PIECE, -(-most_tokens // 8))
        self._full: deque[tuple[int, Corpus]] = deque()  # tokens, the oldest first
        self._newest: list[Sequence[int]] = []
        self._sorted: Corpus | None = None  # the newest ones; None: not yet

    @property
    def tokens(self) -> int:
        return self._newest_tokens + sum(tokens for tokens, _ in self._full)

    @property
    def _newest_tokens(self) -> int:
        return sum(map(len, self._newest))

    def add(self, token_ids: Sequence[int]) -> None:
        for first in range(0, len(token_ids), self._piece):
            part = token_ids[first : first + self._piece]
            if self._newest_tokens + len(part) > self._piece:
                self._full.append((self._newest_tokens, self._newest_corpus()))
                self._newest = []
            self._newest.append(part)
            self._sorted = None
        while self.tokens > self._most_tokens:
            self._full.popleft()

    def corpora(self) -> Iterator[Corpus]:
        """The newest first."""
        if self._newest:
            yield self._newest_corpus()
        for _, corpus in reversed(self._full):
            yield corpus

    def _newest_corpus(self) -> Corpus:
        if self._sorted is None:
            self._sorted = Corpus(self._newest)
        return self._sorted
