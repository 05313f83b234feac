"""A corpus: token sequences that were produced earlier, sorted so that what followed some tokens is found at
once.

Its directory, which `driftguard_training corpus` writes:

    config.json          model_type "driftguard_corpus", vocabulary_sha256, how many documents and tokens
    corpus.safetensors   token_ids int32 [N], ends int64 [documents]: where in token_ids each document ends
    corpus.jsonl         the same as texts, one JSON string a line: what SGLang reads as an external corpus
"""

from __future__ import annotations

import hashlib
import json
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file

from driftguard_engine.core import InvalidModel
from driftguard_engine.models.directory import config_of

MODEL_TYPE: Final = "driftguard_corpus"
WEIGHTS_FILE: Final = "corpus.safetensors"
TEXTS_FILE: Final = "corpus.jsonl"
LONGEST_MATCH: Final = 24  # tokens, as in vLLM's suffix decoding
_SORTED_BY: Final = 64  # tokens: a match and what follows it
TOKEN_BYTES: Final = 4
_SEPARATOR: Final = 2**32 - 1  # behind each document; no token, so that no match goes beyond a document
_MOST_LOOKED_AT: Final = 4_096  # places of a match whose next tokens are counted

Tokens = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Match:
    """The last `length` tokens of a sequence occur at the places order[first:end] of a corpus."""

    length: int
    first: int
    end: int


class Corpus:
    """A suffix array (Manber, Myers 1993) of all documents."""

    def __init__(self, documents: Sequence[Sequence[int]]) -> None:
        parts = [[*document, _SEPARATOR] for document in documents]
        self._tokens: Tokens = np.array([token for part in parts for token in part], np.int64)
        self._bytes = packed(self._tokens)
        self._places: Tokens = _sorted_places(self._tokens)
        self._order = array("q", self._places.tobytes())  # the same, quicker to read one by one

    def longest_match(self, text: bytes, beyond: int = 0) -> Match | None:
        """Of a sequence, `packed`; at most LONGEST_MATCH tokens. None: none has more than `beyond` tokens."""
        fits, found = beyond, None
        too_long = min(len(text) // TOKEN_BYTES, LONGEST_MATCH) + 1
        length = beyond + 1  # first, because there is rarely a longer one
        while too_long - fits > 1:  # where n tokens occur, fewer do
            match = self._match(text[-length * TOKEN_BYTES :], 0, len(self._order))
            if match is None:
                too_long = length
            else:
                fits, found = length, match
            length = (fits + too_long) // 2
        return found

    def continuation(self, match: Match, text: bytes, count: int, least_probability: float) -> list[int]:
        """Up to count tokens: each the one that most often followed those before it. Ends where the part of
        the match's places that are followed by all of them would fall below least_probability."""
        pattern = text[-match.length * TOKEN_BYTES :]
        drafts: list[int] = []
        now, probability = match, 1.0
        while len(drafts) < count and len(pattern) < _SORTED_BY * TOKEN_BYTES:
            token, part = self._most_frequent(now)
            probability *= part
            if token == _SEPARATOR or probability < least_probability:
                break
            drafts.append(token)
            pattern += token.to_bytes(TOKEN_BYTES, "big")
            narrowed = self._match(pattern, now.first, now.end)
            if narrowed is None:
                raise AssertionError("a token that follows the match is not found behind it")
            now = narrowed
        return drafts

    def _match(self, pattern: bytes, first: int, end: int) -> Match | None:
        text, size = self._bytes, len(pattern)

        def beginning(place: int) -> bytes:
            return text[place * TOKEN_BYTES : place * TOKEN_BYTES + size]

        low = bisect_left(self._order, pattern, first, end, key=beginning)
        if low == end or beginning(self._order[low]) != pattern:
            return None
        high = bisect_right(self._order, pattern, low, end, key=beginning)
        return Match(size // TOKEN_BYTES, low, high)

    def _most_frequent(self, match: Match) -> tuple[int, float]:
        """The token that follows most places of the match, and the part of them. Of many places every n-th
        is looked at."""
        stride = -(-(match.end - match.first) // _MOST_LOOKED_AT)
        following = self._tokens[self._places[match.first : match.end : stride] + match.length]
        tokens, counts = np.unique(following, return_counts=True)
        best = int(counts.argmax())
        return int(tokens[best]), float(counts[best]) / len(following)


def packed(token_ids: Sequence[int] | Tokens) -> bytes:
    """Four bytes each, the highest first: ordered as the tokens are."""
    return np.asarray(token_ids, ">u4").tobytes()


def unpacked(text: bytes) -> list[int]:
    found: list[int] = np.frombuffer(text, ">u4").tolist()
    return found


def _sorted_places(tokens: Tokens) -> Tokens:
    """By the _SORTED_BY tokens that begin there; equal ones in order (prefix doubling)."""
    rank: Tokens = np.unique(tokens, return_inverse=True)[1].astype(np.int64)
    width = 1
    while width < _SORTED_BY:
        behind = np.full_like(rank, 0)
        behind[:-width] = rank[width:] + 1
        rank = np.unique(rank * (len(rank) + 1) + behind, return_inverse=True)[1].astype(np.int64)
        width *= 2
    return np.argsort(rank, kind="stable")


def vocabulary_hash(vocabulary: Mapping[str, int]) -> str:
    """The same for two tokenizers that have the same token ids."""
    return hashlib.sha256(json.dumps(vocabulary, sort_keys=True).encode()).hexdigest()


def is_corpus(directory: Path) -> bool:
    """False too where config.json cannot be read: then it is a model that cannot be."""
    try:
        return bool(config_of(directory).get("model_type") == MODEL_TYPE)
    except (OSError, ValueError, AttributeError):
        return False


def read_documents(directory: Path, vocabulary: Mapping[str, int], *, field: str) -> list[list[int]]:
    """The documents of a corpus of this vocabulary. Raises InvalidModel."""
    try:
        config = config_of(directory)
        tensors = load_file(directory / WEIGHTS_FILE)
        token_ids, ends = tensors["token_ids"].tolist(), tensors["ends"].tolist()
    except (OSError, ValueError, AttributeError, KeyError, SafetensorError) as error:
        raise InvalidModel(
            f"{field}: the corpus in {directory} cannot be read ({error})", field=field
        ) from None
    if config.get("vocabulary_sha256") != vocabulary_hash(vocabulary):
        raise InvalidModel(
            f"{field}: the corpus in {directory} was made with another tokenizer than the target's",
            field=field,
        )
    if ends != sorted(ends) or (ends[-1] if ends else 0) != len(token_ids):
        raise InvalidModel(f"{field}: the corpus in {directory} has documents of wrong lengths", field=field)
    largest = max(vocabulary.values(), default=-1)
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) <= largest:
        raise InvalidModel(
            f"{field}: the corpus in {directory} has token ids beyond 0 to {largest}", field=field
        )
    return [token_ids[first:end] for first, end in zip([0, *ends], ends, strict=False)]
