"""What prompts have in common is computed once, and nobody can tell from the outputs: bit for bit."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driftguard_engine.core import FinishedRequest, Request
from driftguard_engine.engine import Engine
from driftguard_engine.kv_cache import Span

from tests.engine.core.tiny import drain, finished, request, save, serve

pytestmark = pytest.mark.slow

SEED = 20282
CHUNK = 8  # of new_engine
SYSTEM = tuple(range(40, 82))  # five chunks and two tokens more


def told(done: dict[str, FinishedRequest]) -> dict[str, tuple[object, ...]]:
    """Drafts too: a draft model that had read another prefix would be accepted otherwise."""
    return {name: (each.output_token_ids, each.finish_reason, each.counts) for name, each in done.items()}


def conversations() -> list[Request]:
    """Prompts that share a chunk, several, all but the last token, or nothing; each chunk's edge is met."""
    rng = random.Random(SEED)
    prompts = [SYSTEM[:length] for length in (1, 8, 9, 10, 16, 17, 18, 42)]
    prompts += [SYSTEM + tuple(rng.randrange(256) for _ in range(rng.randrange(60))) for _ in range(6)]
    prompts += [prompts[-1] + (7,) * 5, prompts[-2][:50] + (8,) * 25, (200,) * 30, (200,) * 31]
    rng.shuffle(prompts)
    return [
        request(
            f"{index}",
            prompt,
            max_tokens=rng.choice([1, 6, 15]),
            temperature=rng.choice([0.0, 1.0]),
            top_k=rng.choice([0, 20]),
            seed=SEED + index,
            num_speculative_tokens=rng.choice([None, None, 0, 2]),
        )
        for index, prompt in enumerate(prompts)
    ]


def serve_at_random(engine: Engine, requests: list[Request]) -> dict[str, FinishedRequest]:
    """At steps of their own; between them come others with the same prompts, aborted on the way."""
    rng, waiting, outputs, doomed = random.Random(SEED), list(requests), [], 0
    while waiting or engine.has_work():
        for _ in range(rng.randrange(3)):
            if waiting:
                engine.submit(waiting.pop())
        if waiting and rng.random() < 0.3:
            engine.submit(request(f"gone{doomed}", rng.choice(requests).prompt_token_ids))
            doomed += 1
        outputs += engine.step()
        if doomed and rng.random() < 0.3:
            engine.abort(f"gone{rng.randrange(doomed)}")
    return {name: each for name, each in finished(outputs).items() if not name.startswith("gone")}


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {"drafter": "draft_model"}),
        ("llama", {"drafter": "draft_model", "ahead": True}),
        ("llama", {"drafter": "eagle3"}),
        ("llama", {"drafter": "eagle3", "ahead": True}),
        ("gpt2", {"drafter": "eagle3"}),
        ("llama", {"drafter": "ngram", "ahead": True}),
        ("llama", {"drafter": "hybrid", "suffix_min_match": 1}),
        ("llama", {"drafter": "hybrid", "suffix_min_match": 1, "ahead": True}),
        ("odd_llama", {"drafter": "none"}),
        ("gpt2", {"drafter": "draft_model"}),
    ],
)
def test_outputs_are_those_of_an_engine_that_reads_every_prompt(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, kind: str, changes: dict[str, Any]
) -> None:
    expected = serve(new_engine(kind, prefix_reuse=False, **changes), *conversations())
    assert all(each.reused_prompt_tokens == 0 for each in expected.values())
    engine = new_engine(kind, max_batch=3, **changes)
    copied = watch_copies(monkeypatch, engine)
    done = serve_at_random(engine, conversations())
    assert told(done) == told(expected)
    reused = {each.reused_prompt_tokens for each in done.values()}
    assert {0, CHUNK, 5 * CHUNK} <= reused
    assert all(tokens % CHUNK == 0 for tokens in reused)
    assert 0 < sum(copied) < sum(each.reused_prompt_tokens for each in done.values())


def watch_copies(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> list[int]:
    copied: list[int] = []
    original = engine._target.model.copy

    def copy(source: int, span: Span) -> None:
        copied.append(span.count)
        original(source, span)

    monkeypatch.setattr(engine._target.model, "copy", copy)
    return copied


def test_requests_that_come_together_compute_what_they_share_once(
    new_engine: Callable[..., Engine],
) -> None:
    requests = [request(f"{index}", (*SYSTEM, index, index), seed=index) for index in range(4)]
    expected = serve(new_engine(prefix_reuse=False), *requests)
    done = serve(new_engine(), *requests)
    assert told(done) == told(expected)
    assert [done[f"{index}"].reused_prompt_tokens for index in range(4)] == [0, 40, 40, 40]


def test_a_conversation_goes_on_in_its_slot_and_others_keep_theirs(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(max_batch=2)
    copied = watch_copies(monkeypatch, engine)
    for turns in (1, 2, 3):  # of two conversations
        for start in (100, 150):
            prompt = (*range(start, start + 16 * turns), 1, 2)
            done = serve(engine, request("r", prompt))["r"]
            assert done.reused_prompt_tokens == 16 * (turns - 1)
    assert copied == []
    third = serve(engine, request("r", range(100, 150)))["r"]
    assert (third.reused_prompt_tokens, copied) == (48, [])


def test_a_slot_that_was_given_away_is_read_anew(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine(max_batch=1)
    first, other = request("r", SYSTEM), request("r", SYSTEM[::-1])
    expected = told(serve(engine, first))
    serve(engine, other)
    done = serve(engine, first)
    assert told(done) == expected
    assert done["r"].reused_prompt_tokens == 0


def test_an_aborted_prompt_leaves_what_was_read_of_it(new_engine: Callable[..., Engine]) -> None:
    expected = told(serve(new_engine(), request("r", SYSTEM, temperature=1.0)))
    engine = new_engine()
    engine.submit(request("gone", SYSTEM))
    for _ in range(3):
        engine.step()
    engine.abort("gone")
    drain(engine)
    done = serve(engine, request("r", SYSTEM, temperature=1.0))
    assert told(done) == expected
    assert done["r"].reused_prompt_tokens == 3 * CHUNK


@pytest.mark.parametrize("ahead", [False, True])
def test_a_draft_that_has_not_read_the_prefix_reads_it(
    new_engine: Callable[..., Engine], tmp_path: Path, ahead: bool
) -> None:
    """It came later, or the prefix was read without a draft; the old one still knows what it read."""
    other, asked = save(tmp_path / "other", "llama", seed=3, noise=0.02), request("r", SYSTEM)
    fresh = new_engine(ahead=ahead, draft=other)
    expected = told(serve(fresh, asked))
    engine = new_engine(ahead=ahead)
    first, first_expected = engine.draft.version, told(serve(engine, asked))
    engine.load_draft(other, version="v2")
    engine.submit(request("keeps the first", (1, 2), max_tokens=100))
    engine.step()
    engine.swap_draft("v2")
    done = finished(step_until(engine, asked))
    assert (told(done), done["r"].reused_prompt_tokens) == (expected, 0)
    without = finished(step_until(engine, request("r", SYSTEM, num_speculative_tokens=0)))
    assert without["r"].reused_prompt_tokens == 40
    again = finished(step_until(engine, asked))
    assert (told(again), again["r"].reused_prompt_tokens) == (expected, 40)
    engine.swap_draft(first)
    back = finished(step_until(engine, asked))
    assert told(back) == first_expected
    drain(engine)


def step_until(engine: Engine, asked: Request) -> list[Any]:
    """Until this one is finished, whatever else runs."""
    outputs: list[Any] = []
    engine.submit(asked)
    while asked.request_id not in finished(outputs):
        outputs += engine.step()
    return [output for output in outputs if output.request_id == asked.request_id]


def test_a_prompt_read_without_a_draft_is_read_again_for_one(new_engine: Callable[..., Engine]) -> None:
    asked = request("r", SYSTEM, max_tokens=40)
    expected = told(serve(new_engine(), asked))
    engine = new_engine()
    serve(engine, request("plain", SYSTEM, num_speculative_tokens=0))
    done = serve(engine, asked)
    assert (told(done), done["r"].reused_prompt_tokens) == (expected, 0)


@pytest.mark.parametrize("ahead", [False, True])
def test_a_draft_of_a_shorter_context_drafts_as_if_it_had_read_all(
    new_engine: Callable[..., Engine], tmp_path: Path, ahead: bool
) -> None:
    """Where its context ends, it overwrites what it holds: prompts of every length around that place."""
    short = save(tmp_path / "short", "llama", seed=3, max_position_embeddings=33)
    lengths = (60, 50, 35, 34, 33, 32, 26, 25)
    requests = [request(f"{length}", range(length), max_tokens=4) for length in lengths]
    expected = serve(new_engine(ahead=ahead, draft=short, prefix_reuse=False), *requests)
    engine = new_engine(ahead=ahead, draft=short, max_batch=2)
    done: dict[str, FinishedRequest] = {}
    for each in requests:
        done |= serve(engine, each)
    assert told(done) == told(expected)
    assert [each.reused_prompt_tokens for each in done.values()] == [0, 48, 32, 32, 24, 24, 24, 16]


@pytest.mark.parametrize("part", ["target", "draft"])
def test_nothing_is_reused_of_a_step_that_failed(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    asked = request("r", SYSTEM, max_tokens=40)
    expected = told(serve(new_engine(), asked))
    engine = new_engine()
    broken: Any = engine._target.model if part == "target" else engine._drafts.drafter
    with monkeypatch.context() as patch:
        patch.setattr(broken, "prefill", failing_at(2 * CHUNK, broken.prefill))
        assert serve(engine, asked)["r"].finish_reason == "error"
    serve(engine, request("plain", SYSTEM, num_speculative_tokens=0))
    done = serve(engine, asked)
    assert (told(done), done["r"].reused_prompt_tokens) == (expected, 0)


def failing_at(position: int, prefill: Callable[..., None]) -> Callable[..., None]:
    def fail(token_ids: list[int], spans: list[Span], *features: Any) -> None:
        if spans[0].start == position:
            raise torch.OutOfMemoryError("no memory left")
        prefill(token_ids, spans, *features)

    return fail
