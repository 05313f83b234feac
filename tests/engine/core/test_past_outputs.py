"""What ended requests have emitted is drafted for later ones, where that is asked for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driftguard_engine.config import InvalidConfig
from driftguard_engine.core import SpeculationCounts
from driftguard_engine.engine import Engine

from tests.engine.core.corpora import save_corpus
from tests.engine.core.tiny import drain, plain_greedy, request, serve, tokens

PROMPT = tuple(range(30, 60))
HYBRID: dict[str, Any] = {"drafter": "hybrid"}
SUFFIX: dict[str, Any] = {"drafter": "suffix", "draft": None}


def accepted(engine: Engine, name: str = "r") -> int:
    done = serve(engine, request(name, PROMPT, 60))[name]
    assert done.output_token_ids == plain_greedy("llama", PROMPT, 60)
    return done.counts.accepted


@pytest.mark.parametrize("changes", [HYBRID, SUFFIX])
@pytest.mark.parametrize("ahead", [False, True])
def test_an_answer_that_was_given_before_is_drafted(
    new_engine: Callable[..., Engine], changes: dict[str, Any], ahead: bool
) -> None:
    engine = new_engine(ahead=ahead, suffix_past_tokens=1000, **changes)
    first = accepted(engine)
    assert accepted(engine) > max(first, 40)


@pytest.mark.parametrize("changes", [HYBRID, SUFFIX])
def test_nothing_is_kept_unless_it_is_asked_for(
    new_engine: Callable[..., Engine], changes: dict[str, Any]
) -> None:
    engine = new_engine(**changes)
    assert engine._past is None
    assert accepted(engine) == accepted(engine)


def test_it_is_kept_over_a_swap_of_the_corpus_and_forgotten_with_newer_outputs(
    new_engine: Callable[..., Engine], models: Path, tmp_path: Path
) -> None:
    engine = new_engine(suffix_past_tokens=80, **SUFFIX)
    first = accepted(engine)
    corpus = engine.load_draft(save_corpus(tmp_path / "corpus", str(models / "llama"), [(7, 7, 7)]))
    engine.swap_draft(corpus.version)
    assert accepted(engine) > max(first, 30)
    serve(engine, *(request(f"{seed}", (9,), 40, temperature=2.0, seed=seed) for seed in range(4)))
    assert accepted(engine) == first


def test_what_an_aborted_request_and_one_without_drafts_emitted_counts(
    new_engine: Callable[..., Engine],
) -> None:
    engine = new_engine(suffix_past_tokens=1000, **SUFFIX)
    first = accepted(new_engine(**SUFFIX))
    engine.submit(request("gone", PROMPT, 60, num_speculative_tokens=0))
    for _ in range(45):
        engine.step()
    engine.abort("gone")
    drain(engine)
    assert accepted(engine) > max(first, 20)


def test_a_seeded_request_draws_other_tokens_after_others_and_the_same_after_the_same(
    new_engine: Callable[..., Engine],
) -> None:
    asked = request("r", PROMPT, 60, temperature=1.0, seed=3)

    def served(*before: int) -> tuple[int, ...]:
        engine = new_engine(suffix_past_tokens=1000, **SUFFIX)
        serve(engine, *(request(f"{seed}", PROMPT, 60, temperature=0.6, seed=seed) for seed in before))
        return tokens(engine, asked)["r"]

    assert served(1, 2) == served(1, 2) != served()


def test_what_a_request_of_the_same_seed_emitted_is_not_drafted_but_where_one_of_them_is_greedy(
    new_engine: Callable[..., Engine],
) -> None:
    """Its random numbers are those that verify the guesses."""

    def served(engine: Engine, temperature: float, seed: int) -> SpeculationCounts:
        asked = request("r", PROMPT, 60, temperature=temperature, seed=seed)
        return serve(engine, asked)["r"].counts

    plain, engine = new_engine(**SUFFIX), new_engine(suffix_past_tokens=1000, **SUFFIX)
    expected = served(plain, 0.01, 3)
    assert served(engine, 0.01, 3) == served(engine, 0.01, 3) == expected
    assert served(engine, 0.01, 4).accepted > expected.accepted + 20
    assert served(engine, 0.0, 3).accepted > expected.accepted + 20
    greedy_first = new_engine(suffix_past_tokens=1000, **SUFFIX)
    served(greedy_first, 0.0, 3)
    assert served(greedy_first, 0.01, 3).accepted > expected.accepted + 20


def test_a_drafter_that_looks_up_nothing_is_refused_by_name(new_engine: Callable[..., Engine]) -> None:
    with pytest.raises(InvalidConfig, match="suffix_past_tokens: given with the drafter 'ngram'"):
        new_engine(drafter="ngram", suffix_past_tokens=10)
    with pytest.raises(InvalidConfig, match="suffix_past_tokens: -1 is not"):
        new_engine(suffix_past_tokens=-1, **SUFFIX)
    with pytest.raises(InvalidConfig, match="corpus: given with the drafter 'suffix'"):
        new_engine(corpus="there", **SUFFIX)
    with pytest.raises(InvalidConfig, match="suffix_min_match: 0 is not"):
        new_engine(suffix_min_match=0, **HYBRID)
    with pytest.raises(InvalidConfig, match="draft: missing; the drafter 'hybrid'"):
        new_engine(drafter="hybrid", draft=None)
