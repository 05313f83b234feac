from __future__ import annotations

from driftguard_engine.drafters.ngram import SuffixIndex


def test_the_continuation_of_the_most_recent_match_is_drafted() -> None:
    index = SuffixIndex(2, 3)
    assert index.continuation([1, 2, 9, 1, 2, 7, 5, 1, 2], 2) == [7, 5]


def test_the_longest_match_wins_over_a_more_recent_shorter_one() -> None:
    index = SuffixIndex(1, 3)
    assert index.continuation([1, 2, 3, 4, 0, 3, 8, 1, 2, 3], 1) == [4]


def test_a_match_near_the_end_goes_on_in_its_own_copy() -> None:
    assert SuffixIndex(1, 2).continuation([5, 6, 5, 6], 5) == [5, 6, 5, 6, 5]


def test_without_a_match_nothing_is_drafted() -> None:
    index = SuffixIndex(2, 4)
    assert index.continuation([1], 4) == []
    assert index.continuation([1, 2, 3, 4], 4) == []
    assert index.continuation([1, 2, 3, 4, 3, 2], 4) == []


def test_an_index_that_grows_with_its_sequence_finds_what_a_new_one_finds() -> None:
    sequence = [value * value % 11 % 5 for value in range(60)]
    growing = SuffixIndex(2, 4)
    for length in range(1, 61):
        new = SuffixIndex(2, 4)
        assert growing.continuation(sequence[:length], 4) == new.continuation(sequence[:length], 4)
