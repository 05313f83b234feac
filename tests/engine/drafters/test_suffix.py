"""Suffix lookup against a search that tries every place."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from driftguard_engine.drafters.corpus import LONGEST_MATCH, Corpus, packed
from driftguard_engine.drafters.suffix import Matches, SuffixDrafter, _longest_match
from driftguard_engine.kernels import ngram

Documents = Sequence[Sequence[int]]
SUFFIX, NGRAMS = Matches(), Matches.of_ngrams(2, 4)


def drafted(
    documents: Documents | None, sequence: list[int], count: int = 8, matches: Matches = SUFFIX
) -> list[int]:
    drafter = SuffixDrafter(None if documents is None else Corpus(documents), matches=matches)
    return drafter.continuation(packed(sequence), count)


def places_of(pattern: Sequence[int], documents: Documents) -> list[tuple[int, int]]:
    """(document, where the pattern ends in it)."""
    size = len(pattern)
    return [
        (number, at + size)
        for number, document in enumerate(documents)
        for at in range(len(document) - size + 1)
        if list(document[at : at + size]) == list(pattern)
    ]


def longest(sequence: Sequence[int], documents: Documents) -> int:
    fitting = (
        n for n in range(min(len(sequence), LONGEST_MATCH), 0, -1) if places_of(sequence[-n:], documents)
    )
    return next(fitting, 0)


def is_most_frequent(token: int, pattern: Sequence[int], documents: Documents) -> bool:
    found = places_of(pattern, documents)
    followers = Counter(documents[at][end] if end < len(documents[at]) else -1 for at, end in found)
    return followers[token] == max(followers.values())


@pytest.mark.parametrize("seed", range(20))
def test_each_draft_is_what_most_often_followed_the_longest_match(seed: int) -> None:
    draw = random.Random(seed)
    # Tokens whose bytes are alike, so that a match that begins inside a token would be taken for one.
    tokens = draw.choice([[0, 1, 2, 3], [0x01010101, 0x01010102, 0x01000000, 0x00010101]])
    documents = [draw.choices(tokens, k=draw.randrange(40)) for _ in range(12)]
    corpus = Corpus(documents)
    for _ in range(40):
        sequence = draw.choices(tokens, k=draw.randrange(1, 50))
        match = corpus.longest_match(packed(sequence[-LONGEST_MATCH:]))
        length = match.length if match is not None else 0
        assert length == longest(sequence, documents)
        if match is None:
            continue
        assert match.end - match.first == len(places_of(sequence[-length:], documents))
        context = list(sequence[-length:])
        for token in corpus.continuation(match, packed(sequence[-LONGEST_MATCH:]), 6, 0.1):
            assert is_most_frequent(token, context, documents)
            context.append(token)


@pytest.mark.parametrize("seed", range(20))
def test_the_sequence_itself_is_searched_wherever_a_token_begins(seed: int) -> None:
    draw = random.Random(seed)
    tokens = draw.choice([[0, 1, 2], [0x01010101, 0x01010102, 0x01000000]])
    sequence = draw.choices(tokens, k=60)
    for end in range(1, 61):
        length, at = _longest_match(packed(sequence[:end]), LONGEST_MATCH)
        assert length == longest(sequence[:end], [sequence[: end - 1]])
        assert length == 0 or sequence[at - length : at] == sequence[end - length : end]


def test_a_draft_is_no_longer_than_its_match() -> None:
    assert drafted([[1, 2, 3, 4, 5, 6, 7, 8]], [9, 2, 3]) == [4, 5]
    assert drafted(None, [1, 2, 3, 4, 5, 1, 2]) == [3, 4]


def test_a_document_ends_a_draft_and_no_match_reaches_over_its_end() -> None:
    assert drafted([[1, 2, 3], [4, 5, 6]], [1, 2]) == [3]
    assert drafted([[1, 2], [3, 4]], [0, 1, 2]) == []
    assert drafted([[1, 2], [3, 4]], [1, 2, 3]) == [4]  # by [3] alone


def test_the_longer_match_decides_and_at_equal_length_the_sequence_itself() -> None:
    assert drafted([[7, 1, 2, 9, 9]], [1, 2, 3, 7, 1, 2]) == [9, 9]
    assert drafted([[1, 2, 9, 9]], [1, 2, 3, 4, 7, 1, 2]) == [3, 4]


def test_what_rarely_followed_is_not_drafted() -> None:
    documents = [[1, 2, 3, after] for after in range(100, 120)]
    assert drafted(documents, [1, 2]) == [3]  # then each token follows a twentieth
    assert drafted(documents[:5], [1, 2]) == [3, 100]


def test_an_empty_corpus_and_a_lonely_token_draft_nothing() -> None:
    assert drafted([], [1, 2, 3]) == []
    assert drafted([[]], [1, 2, 3]) == []
    assert drafted(None, [1]) == []


def test_behind_the_longest_match_the_draft_goes_on() -> None:
    document = list(range(100))
    assert drafted([document], document[:50], 30) == document[50 : 50 + LONGEST_MATCH]


@pytest.mark.parametrize("seed", range(10))
def test_ngrams_without_a_corpus_are_looked_up_as_by_the_kernel(seed: int) -> None:
    draw = random.Random(seed)
    least, most = sorted(draw.choices(range(1, 6), k=2))
    for _ in range(30):
        sequence = draw.choices(range(4), k=draw.randrange(1, 50))
        one = torch.tensor([0]), torch.tensor([len(sequence)])
        known = ngram.reference(torch.tensor([sequence]), *one, least, most, 6)[0]
        found = drafted(None, sequence, 6, Matches.of_ngrams(least, most))
        assert found == known[known >= 0].tolist()


def test_an_ngram_of_a_corpus_is_followed_as_far_as_a_document_goes() -> None:
    """Also behind a short match, and where each token followed rarely; of equally long matches the sequence's
    own counts."""
    assert drafted([[1, 2, 3, 4, 5, 6, 7]], [9, 1, 2], matches=NGRAMS) == [3, 4, 5, 6, 7]
    assert drafted([[1, 2, 3, 4, 5, 6, 7]], [9, 1, 2], 3, NGRAMS) == [3, 4, 5]
    assert drafted([[1, 2, after] for after in range(100, 120)], [1, 2], 1, NGRAMS) == [100]
    assert drafted([[1, 2, 9]], [1, 2, 3, 1, 2], 2, NGRAMS) == [3, 1]


def test_ngrams_are_no_shorter_and_no_longer_than_told() -> None:
    assert drafted([[2, 3]], [1, 2], matches=NGRAMS) == []
    assert drafted([[2, 3]], [1, 2, 7, 2], matches=NGRAMS) == []
    five = [[1, 2, 3, 4, 5, 8], [2, 3, 4, 5, 9], [2, 3, 4, 5, 9]]
    assert drafted(five, [1, 2, 3, 4, 5], matches=SUFFIX) == [8]
    assert drafted(five, [1, 2, 3, 4, 5], matches=NGRAMS) == [9]
