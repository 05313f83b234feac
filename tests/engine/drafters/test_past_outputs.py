"""Past outputs against a search that tries every place of what must be kept."""

from __future__ import annotations

import random

import pytest
from driftguard_engine.drafters import past_outputs
from driftguard_engine.drafters.corpus import LONGEST_MATCH, Corpus, packed
from driftguard_engine.drafters.past_outputs import PastOutputs
from driftguard_engine.drafters.suffix import SuffixDrafter

from tests.engine.drafters.test_suffix import longest


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(past_outputs, "PIECE", 20)


def filled(most: int, *outputs: list[int]) -> PastOutputs:
    past = PastOutputs(most)
    for output in outputs:
        past.add(output, None)
    return past


def longest_of(past: PastOutputs, sequence: list[int]) -> int:
    matches = (corpus.longest_match(packed(sequence[-LONGEST_MATCH:])) for corpus in past.corpora(None))
    return max((match.length for match in matches if match is not None), default=0)


@pytest.mark.parametrize("seed", range(10))
def test_the_longest_match_is_that_in_all_outputs(seed: int) -> None:
    draw = random.Random(seed)
    outputs = [draw.choices(range(4), k=draw.randrange(21)) for _ in range(30)]
    past = PastOutputs(10_000)
    for count, output in enumerate(outputs, 1):
        past.add(output, None)
        sequence = draw.choices(range(4), k=30)
        assert longest_of(past, sequence) == longest(sequence, outputs[:count])
    assert past.tokens == sum(map(len, outputs))


@pytest.mark.parametrize("most", [1, 7, 100, 160, 1000])
def test_the_newest_tokens_are_kept_and_no_more_than_asked_for(most: int) -> None:
    draw, past, outputs = random.Random(most), PastOutputs(most), list[list[int]]()
    for number in range(400):
        outputs.append([number] * draw.choice([0, 1, 5, 15]))
        past.add(outputs[-1], None)
        emitted = [token for output in outputs for token in output]
        assert min(len(emitted), most - most // 8 - 15) <= past.tokens <= most
        if emitted:
            assert longest_of(past, emitted[-1:]) == 1
    assert longest_of(past, [1]) == 0


def test_an_output_longer_than_a_piece_is_looked_up_in_all_of_its_parts() -> None:
    past = filled(1000, list(range(95)))
    drafter = SuffixDrafter(None, past)
    assert past.tokens == 95
    assert drafter.continuation(packed([200, 5, 6, 7, 8]), 4) == [9, 10, 11, 12]
    assert drafter.continuation(packed([200, 81, 82, 83, 84]), 4) == [85, 86, 87, 88]


def test_of_equal_matches_the_sequence_goes_first_then_the_newest_output_then_the_corpus() -> None:
    corpus = Corpus([[1, 2, 50]])
    drafter = SuffixDrafter(corpus, filled(1000, [1, 2, 60] * 7, [1, 2, 70]))
    assert drafter.continuation(packed([9, 1, 2]), 1) == [70]
    assert drafter.continuation(packed([1, 2, 80, 1, 2]), 1) == [80]
    assert SuffixDrafter(corpus, PastOutputs(1000)).continuation(packed([9, 1, 2]), 1) == [50]


def test_no_match_reaches_from_one_output_into_the_next() -> None:
    drafter = SuffixDrafter(None, filled(1000, [1, 2], [3, 4]))
    assert drafter.continuation(packed([1, 2]), 4) == []
    assert drafter.continuation(packed([2, 3]), 4) == [4]


def test_outputs_of_the_same_seed_are_not_shown_and_others_are() -> None:
    past = PastOutputs(1000)
    for seed, output in [(7, [1, 2, 3, 4]), (8, [20] * 18), (None, [1, 2, 5, 6])]:
        past.add(output, seed)
    drafter = SuffixDrafter(None, past)
    told = {seed: drafter.continuation(packed([9, 1, 2, 3]), 1, seed=seed) for seed in (None, 7, 8)}
    assert told == {None: [4], 7: [], 8: [4]}
    assert drafter.continuation(packed([9, 1, 2]), 2, seed=7) == [5, 6]
