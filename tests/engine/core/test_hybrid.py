"""A hybrid of suffix lookup and a model: what each of the two drafts, side by side."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from driftguard_engine.drafters.draft_model import DraftModelDrafter
from driftguard_engine.drafters.hybrid import HybridDrafter
from driftguard_engine.engine import Engine
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.speculation import ReferenceVerification

from tests.engine.core.corpora import save_corpus
from tests.engine.core.tiny import drain, finished, plain_greedy, request, serve

PROMPTS = {"a": tuple(range(12)), "b": tuple(range(20, 31)), "c": (7,)}
COUNT = 100


@pytest.fixture
def guesses(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Of each step: how many rows were guessed, and how many were drawn."""
    seen: list[tuple[int, int]] = []
    guess, draft = ReferenceVerification.guess, DraftModelDrafter.draft
    draft_of_hybrid = HybridDrafter.draft

    def draft_step(self: HybridDrafter, *given: object) -> None:
        seen.append((0, 0))
        draft_of_hybrid(self, *given)  # type: ignore[arg-type]

    def guess_rows(self: ReferenceVerification, rows: Sequence[int], tokens: torch.Tensor) -> None:
        seen[-1] = (len(rows), 0)
        guess(self, rows, tokens)

    def draft_rows(self: DraftModelDrafter, rows: RowState, *given: object) -> None:
        seen[-1] = (seen[-1][0], int((rows.drafted > 0).sum()))
        draft(self, rows, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(HybridDrafter, "draft", draft_step)
    monkeypatch.setattr(ReferenceVerification, "guess", guess_rows)
    monkeypatch.setattr(DraftModelDrafter, "draft", draft_rows)
    return seen


def engine_with_parts_of_the_answers(
    new_engine: Callable[..., Engine], models: Path, directory: Path, ahead: bool
) -> Engine:
    """The draft is the target itself, and the corpus has ten tokens of every twenty: all drafts are right."""
    answers = [plain_greedy("llama", prompt, COUNT) for prompt in PROMPTS.values()]
    documents = [answer[at : at + 10] for answer in answers for at in range(3, COUNT, 20)]
    corpus = save_corpus(directory / "corpus", str(models / "llama"), documents)
    return new_engine(
        drafter="hybrid", draft=str(models / "llama"), corpus=corpus, suffix_min_match=4, ahead=ahead
    )


@pytest.mark.parametrize("ahead", [False, True])
def test_the_model_has_read_what_was_guessed(
    new_engine: Callable[..., Engine],
    models: Path,
    tmp_path: Path,
    guesses: list[tuple[int, int]],
    ahead: bool,
) -> None:
    engine = engine_with_parts_of_the_answers(new_engine, models, tmp_path, ahead)
    done = serve(engine, *(request(name, prompt, COUNT) for name, prompt in PROMPTS.items()))
    for name, prompt in PROMPTS.items():
        assert done[name].output_token_ids == plain_greedy("llama", prompt, COUNT)
        assert done[name].counts.accepted == done[name].counts.drafted
    assert sum(guessed > 0 and drawn > 0 for guessed, drawn in guesses) > 5
    assert (done["a"].draft.method, done["a"].num_speculative_tokens) == ("hybrid", 4)


def test_what_was_guessed_and_not_read_is_seen(
    new_engine: Callable[..., Engine], models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check above can fail."""
    monkeypatch.setattr(HybridDrafter, "_catch_up", lambda *_: None)
    engine = engine_with_parts_of_the_answers(new_engine, models, tmp_path, ahead=False)
    done = serve(engine, *(request(name, prompt, COUNT) for name, prompt in PROMPTS.items()))
    assert {done[name].output_token_ids for name in PROMPTS} == {
        plain_greedy("llama", prompt, COUNT) for prompt in PROMPTS.values()
    }
    assert any(each.counts.accepted < each.counts.drafted for each in done.values())


def test_steps_without_drafts_between_guesses_are_read_too(
    new_engine: Callable[..., Engine], models: Path, tmp_path: Path, guesses: list[tuple[int, int]]
) -> None:
    engine = engine_with_parts_of_the_answers(new_engine, models, tmp_path, ahead=False)
    for name, prompt in PROMPTS.items():
        engine.submit(request(name, prompt, COUNT))
    outputs = engine.step()
    rows = [*engine._sequences.values()]
    for step in range(1000):
        for index, row in enumerate(rows):
            row.num_speculative_tokens = 3 if (step // 3 + index) % 2 else 0
        if not engine.has_work():
            break
        outputs += engine.step()
    for name, done in finished(outputs + drain(engine)).items():
        assert done.output_token_ids == plain_greedy("llama", PROMPTS[name], COUNT)
        assert done.counts.accepted == done.counts.drafted > 20
    assert any(guessed for guessed, _ in guesses)
    assert any(drawn for _, drawn in guesses)


def test_a_model_without_usable_logits_leaves_the_guesses_and_says_so(
    new_engine: Callable[..., Engine],
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    engine = engine_with_parts_of_the_answers(new_engine, models, tmp_path, ahead=False)
    drafter = engine._drafts.drafter
    assert isinstance(drafter, HybridDrafter)
    assert isinstance(drafter.model, DraftModelDrafter)
    monkeypatch.setattr(drafter.model.model, "decode_into", lambda logits, *_: logits.fill_(torch.nan))
    with caplog.at_level(logging.ERROR):
        done = serve(engine, request("a", PROMPTS["a"], COUNT))["a"]
    assert done.output_token_ids == plain_greedy("llama", PROMPTS["a"], COUNT)
    assert done.counts.accepted > 10
    assert "the draft model of the hybrid gives no usable logits" in caplog.text


@pytest.mark.parametrize("ahead", [False, True])
def test_fewer_guesses_than_asked_for_are_no_fault(
    new_engine: Callable[..., Engine],
    models: Path,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    ahead: bool,
) -> None:
    engine = engine_with_parts_of_the_answers(new_engine, models, tmp_path, ahead)
    with caplog.at_level(logging.ERROR):
        done = serve(engine, request("a", PROMPTS["a"], COUNT))["a"]
    assert done.counts.drafted_per_position[0] > done.counts.drafted_per_position[3]
    assert not caplog.records
