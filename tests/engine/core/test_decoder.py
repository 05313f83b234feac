"""Decoding, with the outcome of a step at once (on a CPU) and one step later (on a GPU)."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driftguard_engine.config import InvalidConfig
from driftguard_engine.core import FinishedRequest, Request
from driftguard_engine.drafters.draft_model import DraftModelDrafter
from driftguard_engine.engine import Engine, lost_device
from driftguard_engine.models.llama import LlamaModel

from tests.engine.core.tiny import drain, finished, plain_greedy, request, save, serve, tokens

SEED = 20281


def traffic() -> list[Request]:
    """Every way to sample and to end, prompts from one token to several chunks, more than there are slots."""
    prompts = [(7,), (1, 2, 3, 4) * 5, tuple(range(30, 60)), (9, 9, 9, 9, 9), (200, 100), tuple(range(150))]
    ways: list[dict[str, Any]] = [
        {},
        {"temperature": 0.8},
        {"temperature": 1.0, "top_k": 5},
        {"temperature": 1.3, "top_p": 0.7, "num_speculative_tokens": 7},
        {"temperature": 1.0, "ignore_eos": False, "max_tokens": 120},
        {"num_speculative_tokens": 0},
        {"num_speculative_tokens": 1, "max_tokens": 1},
        {"temperature": 1.0, "stop": tuple("etaoins 1\x05\x06"), "max_tokens": 100},
    ]
    return [
        request(f"{index}", prompts[index % len(prompts)], seed=SEED + index, **way)
        for index, way in enumerate(ways)
    ]


def told(done: FinishedRequest) -> tuple[object, ...]:
    return (done.output_token_ids, done.text, done.finish_reason, done.counts, done.num_speculative_tokens)


@pytest.mark.parametrize("drafter", ["draft_model", "eagle3", "ngram", "hybrid", "none"])
def test_requests_of_all_kinds_get_the_same_one_step_later(
    new_engine: Callable[..., Engine], drafter: str
) -> None:
    expected = serve(new_engine(drafter=drafter), *traffic())
    engine = new_engine(drafter=drafter, ahead=True)
    done = serve(engine, *traffic())
    assert {name: told(each) for name, each in done.items()} == {
        name: told(each) for name, each in expected.items()
    }
    assert {each.finish_reason for each in done.values()} == {"length", "stop"}


@pytest.mark.parametrize("kind", ["llama", "odd_llama", "gpt2"])
def test_greedy_text_is_plain_greedy_decoding(new_engine: Callable[..., Engine], kind: str) -> None:
    """Steps of a model that transformers computes cannot run ahead, and serve all the same."""
    prompts = {"a": (7,), "b": (1, 2, 3, 4) * 5}
    engine = new_engine(kind, ahead=True)
    done = tokens(engine, *(request(name, prompt, 40) for name, prompt in prompts.items()))
    assert done == {name: plain_greedy(kind, prompt, 40) for name, prompt in prompts.items()}


def test_a_draft_that_transformers_computes_serves_beside_steps_that_run_ahead(
    new_engine: Callable[..., Engine], models: Path
) -> None:
    engine = new_engine(ahead=True)
    engine.load_draft(str(models / "gpt2_draft"), "v2")
    engine.submit(request("first", (7, 8), 40))
    outputs = engine.step()
    engine.swap_draft("v2")
    engine.submit(request("second", (7, 8), 40))
    done = finished(outputs + drain(engine))
    assert {each.output_token_ids for each in done.values()} == {plain_greedy("llama", (7, 8), 40)}
    assert done["second"].draft.version == "v2"
    assert done["second"].counts.drafted > 0


@pytest.mark.parametrize("drafter", ["draft_model", "ngram"])
def test_more_drafts_than_the_kernels_verify(new_engine: Callable[..., Engine], drafter: str) -> None:
    """On a CPU; a GPU's engine says that it cannot."""
    engine = new_engine(drafter=drafter, max_speculative_tokens=40)
    prompt = (1, 2, 3, 4) * 5
    asked = [request("many", prompt, 100, num_speculative_tokens=40), request("few", prompt, 100)]
    done = serve(engine, *asked)
    assert {each.output_token_ids for each in done.values()} == {plain_greedy("llama", prompt, 100)}
    assert len(done["many"].counts.drafted_per_position) == 40
    with pytest.raises(InvalidConfig, match="max_speculative_tokens: 32 is more than the 31"):
        new_engine(ahead=True, max_speculative_tokens=32)


def test_a_request_is_sampled_as_it_asks_though_its_id_was_used_before(
    new_engine: Callable[..., Engine],
) -> None:
    engine = new_engine()
    expected = tokens(engine, request("other", temperature=1.0, seed=5))["other"]
    greedy = tokens(engine, request("r"))["r"]
    assert tokens(engine, request("r", temperature=1.0, seed=5))["r"] == expected != greedy


def test_the_host_reads_one_step_behind(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine(ahead=True, drafter="none")
    engine.submit(request(max_tokens=3))
    emitted = [[len(output.token_ids) for output in engine.step()] for _ in range(4)]
    assert emitted == [[], [1], [1], [1]]
    assert not engine.has_work()


def test_what_a_request_leaves_behind_reaches_nobody(new_engine: Callable[..., Engine]) -> None:
    """Aborted with a step in flight: the next in its slot begins with its own tokens."""
    expected = tokens(new_engine(), request("b", (8, 8, 8)))["b"]
    engine = new_engine(ahead=True, max_batch=1)
    engine.submit(request("a", max_tokens=50))
    engine.submit(request("b", (8, 8, 8)))
    for _ in range(3):
        engine.step()
    engine.abort("a")
    done = finished(drain(engine))
    assert done["a"].finish_reason == "abort"
    assert done["b"].output_token_ids == expected


@pytest.mark.parametrize("ahead", [False, True])
def test_a_draft_model_reads_what_was_decoded_without_it(
    new_engine: Callable[..., Engine], models: Path, ahead: bool
) -> None:
    """Five steps without drafts, five with, and so on, for two requests in turn: a draft that is the target
    itself is always right."""
    engine = new_engine(ahead=ahead, draft=str(models / "llama"))
    asked = {
        name: request(name, prompt, 100) for name, prompt in {"a": range(12), "b": range(20, 31)}.items()
    }
    for each in asked.values():
        engine.submit(each)
    outputs = engine.step()  # reads a part of the prompts only
    rows = [*engine._sequences.values()]
    for step in range(1000):
        for index, row in enumerate(rows):
            row.num_speculative_tokens = 4 if (step // 5 + index) % 2 else 0
        if not engine.has_work():
            break
        outputs += engine.step()
    for name, done in finished(outputs).items():
        assert done.output_token_ids == plain_greedy("llama", asked[name].prompt_token_ids, 100)
        assert done.counts.accepted == done.counts.drafted > 30
        assert done.counts.steps > 30


def patch_decode(
    monkeypatch: pytest.MonkeyPatch,
    model: LlamaModel,
    slot: int | None,
    change: Callable[[torch.Tensor], Any],
) -> None:
    """change: of a row's logits [T, V], in place or by an error, from position 6 on; slot None: all."""
    original, original_into = model.decode, model.decode_into

    def changed(logits: torch.Tensor, starts: torch.Tensor, slots: torch.Tensor) -> None:
        for row, (start, own) in enumerate(zip(starts.tolist(), slots.tolist(), strict=True)):
            if start >= 6 and own in (slot, own if slot is None else slot):
                change(logits[row])

    def decode(*given: Any) -> torch.Tensor:
        logits = original(*given)
        changed(logits, *given[1:3])
        return logits

    def decode_into(logits: torch.Tensor, *given: Any) -> None:
        original_into(logits, *given)
        changed(logits[:, None], *given[2:4])

    monkeypatch.setattr(model, "decode", decode)
    monkeypatch.setattr(model, "decode_into", decode_into)


@pytest.mark.parametrize("ahead", [False, True])
def test_only_the_request_without_usable_logits_ends_and_the_log_names_it(
    new_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ahead: bool,
) -> None:
    engine = new_engine(ahead=ahead)
    asked = [request(name, [5, 6, place]) for place, name in enumerate("abc")]
    expected = tokens(engine, *asked)
    assert isinstance(engine._target.model, LlamaModel)
    patch_decode(monkeypatch, engine._target.model, 1, lambda logits: logits.fill_(torch.nan))
    with caplog.at_level(logging.ERROR):
        done = serve(engine, *asked)
    assert done["b"].finish_reason == "error"
    assert "no usable logits" in (done["b"].error or "")
    assert "request b ends with an error: the model gave no usable logits" in caplog.text
    assert {name: done[name].output_token_ids for name in "ac"} == {name: expected[name] for name in "ac"}


@pytest.mark.parametrize("ahead", [False, True])
def test_a_draft_without_usable_logits_costs_speed_only_and_says_so(
    new_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ahead: bool,
) -> None:
    engine = new_engine(ahead=ahead)
    asked = request(prompt=range(10))
    expected = tokens(engine, asked)["r"]
    drafter = engine._drafts.drafter
    assert isinstance(drafter, DraftModelDrafter)
    assert isinstance(drafter.model, LlamaModel)
    patch_decode(monkeypatch, drafter.model, None, lambda logits: logits.fill_(torch.nan))
    with caplog.at_level(logging.ERROR):
        done = serve(engine, asked)["r"]
    assert (done.output_token_ids, done.counts.drafted, done.counts.steps) == (expected, 0, 12)
    assert "no usable logits" in caplog.text


def test_a_failed_step_ends_its_requests_with_the_reason_and_the_engine_goes_on(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(ahead=True, max_batch=1)
    asked = [request("a", range(3)), request("b", range(4))]
    expected = tokens(engine, *asked)
    assert isinstance(engine._target.model, LlamaModel)

    def fail(logits: torch.Tensor) -> None:
        monkeypatch.undo()
        raise torch.OutOfMemoryError("no memory left")

    patch_decode(monkeypatch, engine._target.model, 0, fail)
    done = serve(engine, *asked)
    assert (done["a"].finish_reason, done["a"].error) == ("error", "OutOfMemoryError: no memory left")
    assert done["a"].output_token_ids == expected["a"][: len(done["a"].output_token_ids)]
    assert done["b"].output_token_ids == expected["b"]


def test_a_prompt_that_does_not_reach_the_device_ends_its_request_with_the_reason(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(ahead=True, max_batch=2)
    expected = tokens(engine, request("c", range(5)))["c"]

    def fail(row: Any) -> None:
        monkeypatch.undo()
        raise torch.OutOfMemoryError("no memory left")

    monkeypatch.setattr(engine._decoder, "admit", fail)
    done = serve(engine, request("a", range(3)), request("b", range(4)), request("c", range(5)))
    assert {done[name].error for name in "ab"} == {"OutOfMemoryError: no memory left"}
    assert done["c"].output_token_ids == expected


def test_a_device_that_fails_at_everything_is_told_as_lost(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failing device is played: nothing here can lose one."""

    def fail(*arguments: Any) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert lost_device(torch.device("cuda", 0)) is None
    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    assert lost_device(torch.device("cuda", 0)) == "CUDA error: unspecified launch failure"


def test_a_draft_with_another_shape_of_vocabulary_and_context_still_drafts(
    new_engine: Callable[..., Engine], tmp_path: Path
) -> None:
    """Both sides of the vocabulary, and a draft that stops drafting where its own context ends."""
    asked = traffic()[:3]
    for vocabulary in (257 - 1, 300):
        draft = save(tmp_path / str(vocabulary), seed=3, vocab_size=vocabulary, max_position_embeddings=40)
        host, device = (serve(new_engine(draft=draft, ahead=ahead), *asked) for ahead in (False, True))
        assert {name: told(each) for name, each in device.items()} == {
            name: told(each) for name, each in host.items()
        }
        assert sum(each.counts.drafted for each in device.values()) > 0


def test_steps_of_a_draft_that_is_gone_are_gone(new_engine: Callable[..., Engine], models: Path) -> None:
    engine = new_engine(ahead=True)
    serve(engine, request())
    engine.load_draft(str(models / "odd_llama_draft"), "v2")
    engine.swap_draft("v2")
    assert list(engine._decoder._drafted) == [engine._drafts.drafter]
