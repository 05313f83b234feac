"""What ended requests have emitted, to be looked up in by later ones."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from driftguard_engine.drafters.corpus import Corpus

PIECE = 4_096  # tokens


class PastOutputs:
    """The newest outputs, in pieces of up to PIECE tokens, each a corpus of its own: so an output is sorted
    among those of the newest piece only, and the oldest piece is dropped as a whole. An output of more tokens
    than a piece is cut. Used by the engine's thread only.

    Requests with the same seed have the same random numbers, and a guess must not depend on those that verify
    it: a sampled request is not shown a piece with an output that was sampled with its seed.
    """

    def __init__(self, most_tokens: int) -> None:
        """most_tokens: once there are as many, between seven eighths of them and all are kept."""
        self._most_tokens = most_tokens
        self._piece = min(PIECE, -(-most_tokens // 8))
        self._full: deque[_Piece] = deque()  # the oldest first
        self._newest = _Piece()

    @property
    def tokens(self) -> int:
        return self._newest.tokens + sum(piece.tokens for piece in self._full)

    def add(self, token_ids: Sequence[int], seed: int | None) -> None:
        """seed: that of the request; None: it was greedy."""
        for first in range(0, len(token_ids), self._piece):
            part = token_ids[first : first + self._piece]
            if self._newest.tokens + len(part) > self._piece:
                self._full.append(self._newest)
                self._newest = _Piece()
            self._newest.add(part, seed)
        while self.tokens > self._most_tokens:
            self._full.popleft()

    def corpora(self, seed: int | None) -> Iterator[Corpus]:
        """For a request with this seed, None: a greedy one. The newest first."""
        for piece in (self._newest, *reversed(self._full)):
            if seed not in piece.seeds:
                yield piece.corpus()


class _Piece:
    def __init__(self) -> None:
        self.tokens = 0
        self.seeds: set[int] = set()
        self._outputs: list[Sequence[int]] = []
        self._sorted: Corpus | None = None  # None: not yet with the newest output

    def add(self, token_ids: Sequence[int], seed: int | None) -> None:
        self.tokens += len(token_ids)
        self._outputs.append(token_ids)
        self._sorted = None
        if seed is not None:
            self.seeds.add(seed)

    def corpus(self) -> Corpus:
        if self._sorted is None:
            self._sorted = Corpus(self._outputs)
        return self._sorted
