"""Drafting without a model: what followed the longest match of the sequence's end, in itself, in what ended
requests have emitted, or in a corpus.

Suffix decoding (Oliaro et al. 2024, arXiv:2411.04975) for a chain of drafts. Drafts are not sampled, so the
distribution of each is a point mass, and how many there are depends on tokens that were emitted, never on a
token that was drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from driftguard_engine.drafters.base import Drafter
from driftguard_engine.drafters.corpus import LONGEST_MATCH, TOKEN_BYTES, Corpus, packed, unpacked
from driftguard_engine.drafters.past_outputs import PastOutputs
from driftguard_engine.kernels import steps
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.speculation import Verification

# Last tokens of a sequence: what lies before would cost time at every step, and is rarely needed.
SEARCHED = 16_384


@dataclass(frozen=True, slots=True)
class Matches:
    """Which matches are drafted from, those of `least` to `most` tokens, and how far: spec_factor tokens for
    each token of the match, and in a corpus while they followed at least this part of its places. By default
    as in vLLM's suffix decoding."""

    least: int = 1
    most: int = LONGEST_MATCH
    spec_factor: float = 1.0
    least_probability: float = 0.1

    @classmethod
    def of_ngrams(cls, least: int, most: int) -> Matches:
        """Short matches, which say nothing of how far to draft: as far as is asked for."""
        return cls(least, most, math.inf, 0.0)


class SuffixDrafter(Drafter):
    """See `Drafter`. Without a corpus and past outputs only the sequence itself is searched."""

    obstacle = "it looks up on the host, for which each step waits"

    def __init__(
        self, corpus: Corpus | None, past: PastOutputs | None = None, matches: Matches | None = None
    ) -> None:
        self._corpus, self._past, self._matches = corpus, past, matches or Matches()

    def draft(self, rows: RowState, verification: Verification, launcher: Launcher | None) -> None:
        tokens = verification.draft_tokens
        tokens.copy_(self.look_up(rows, tokens.shape[1]))
        steps.feed(launcher, rows, tokens, 0, tokens.shape[1])

    def look_up(self, rows: RowState, drafts: int) -> Tensor:
        """Drafts of each row [B, K] int64 on the CPU, K = drafts, padded with -1; none of a row without a
        match."""
        found = np.full((len(rows.slots), drafts), -1, np.int64)
        told = (rows.slots, rows.lengths, rows.drafted, rows.seeds, rows.scales)
        places = zip(*(each.tolist() for each in told), strict=True)
        for row, (slot, length, count, seed, scale) in enumerate(places):
            text = rows.state.token_ids[slot, max(length - SEARCHED, 0) : length]
            known_seed = seed if scale else None
            tokens = self.continuation(packed(text.cpu().numpy()), count, known_seed)
            found[row, : len(tokens)] = tokens
        return torch.from_numpy(found)

    def continuation(self, text: bytes, count: int, seed: int | None = None) -> list[int]:
        """Up to count tokens behind a sequence, `packed`. seed: of its request, None: it is greedy.

        The longest match decides: of equal ones that in the sequence itself, then the newest past outputs,
        then the corpus. In the sequence, one so close to the end that fewer tokens follow it goes on in its
        own copy.
        """
        if not count:
            return []
        matches = self._matches
        text = text[-SEARCHED * TOKEN_BYTES :]
        suffix = text[-matches.most * TOKEN_BYTES :]
        length, end = _longest_match(text, matches.most)
        source: Corpus | None = None
        for corpus in self._corpora(seed):
            if (longer := corpus.longest_match(suffix, length)) is not None:
                source, match, length = corpus, longer, longer.length
        if length < matches.least:
            return []
        most = int(min(count, matches.spec_factor * length))
        if source is not None:
            return source.continuation(match, suffix, most, matches.least_probability)
        followers = unpacked(text[end * TOKEN_BYTES :][: most * TOKEN_BYTES])
        return [followers[place % len(followers)] for place in range(most)]

    def _corpora(self, seed: int | None) -> Iterator[Corpus]:
        if self._past is not None:
            yield from self._past.corpora(seed)
        if self._corpus is not None:
            yield self._corpus


def _longest_match(text: bytes, most: int) -> tuple[int, int]:
    """(tokens, up to most, of the end that occurred before; where the last such place ends).
    (0, 0): not even the last token did."""
    fits, end, too_long = 0, 0, min(len(text) // TOKEN_BYTES - 1, most) + 1
    while too_long - fits > 1:  # where n tokens occur, fewer do
        length = (fits + too_long) // 2
        place = _last_place(text, length)
        if place is None:
            too_long = length
        else:
            fits, end = length, place + length
    return fits, end


def _last_place(text: bytes, length: int) -> int | None:
    """Where the last so many tokens occurred before, most recently."""
    pattern, end = text[-length * TOKEN_BYTES :], len(text) - 1
    while (found := text.rfind(pattern, 0, end)) >= 0:
        if found % TOKEN_BYTES == 0:
            return found // TOKEN_BYTES
        end = found + len(pattern) - 1
    return None
