"""Requests that are aborted, and steps that fail: everything ends, nothing hangs, the engine goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from driftguard_engine.core import RequestOutput
from driftguard_engine.engine import Engine
from driftguard_engine.sequence import RunningSequence

from tests.engine.core.tiny import drain, finished, request, serve, tokens


def test_running_and_waiting_requests_can_be_aborted(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine(max_batch=2)
    alone = tokens(new_engine(), request("b", max_tokens=20))["b"]
    for name in "abcd":
        engine.submit(request(name, max_tokens=20))
    outputs = engine.step()
    assert (engine.running, engine.waiting) == (2, 2)
    for name in ("a", "c", "unknown"):
        engine.abort(name)
    outputs += engine.step()
    done = finished(outputs)
    assert {name: each.finish_reason for name, each in done.items()} == {"a": "abort", "c": "abort"}
    assert 0 < len(done["a"].output_token_ids) < 20
    assert (done["c"].output_token_ids, done["c"].counts.steps, done["c"].draft) == ((), 0, engine.draft)
    done = finished(outputs + drain(engine))
    assert done["b"].output_token_ids == done["d"].output_token_ids == alone
    assert engine.step() == []


@pytest.mark.parametrize("ahead", [False, True])
def test_a_request_tried_alone_runs_next_and_beside_none(
    new_engine: Callable[..., Engine], ahead: bool
) -> None:
    engine = new_engine(max_batch=2, max_waiting=1, ahead=ahead)
    expected = tokens(engine, request("a"))["a"]
    for name in "abc":
        engine.submit(request(name, max_tokens=9 if name == "b" else 12))
    outputs = engine.step()
    engine.try_alone(request("alone"))
    outputs += drain(engine)
    ended = [each.request_id for each in outputs if each.finished is not None]
    assert ended == ["b", "a", "alone", "c"]
    done = finished(outputs)
    assert done["alone"].concurrency == 1
    assert done["alone"].output_token_ids == done["c"].output_token_ids == expected
    engine.submit(request("d"))
    engine.try_alone(request("alone"))
    engine.abort("alone")
    reasons = {name: each.finish_reason for name, each in finished(drain(engine)).items()}
    assert reasons == {"alone": "abort", "d": "length"}


def test_an_abort_before_the_first_step_ends_the_request(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine()
    engine.submit(request("a"))
    engine.abort("a")
    assert finished(drain(engine))["a"].finish_reason == "abort"


def test_waiting_for_work(new_engine: Callable[..., Engine]) -> None:
    engine = new_engine()
    assert not engine.wait_for_work(0.001)
    engine.submit(request())
    assert engine.wait_for_work(0.001)


def failing_once(monkeypatch: pytest.MonkeyPatch, target: Any, name: str, error: Exception) -> None:
    original, calls = getattr(target, name), []

    def fail_second(*arguments: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise error
        return original(*arguments)

    monkeypatch.setattr(target, name, fail_second)


@pytest.mark.parametrize("part", ["target", "draft"])
def test_a_failed_step_ends_its_requests_with_the_reason_and_the_engine_goes_on(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    engine = new_engine(max_batch=2)
    expected = tokens(engine, *(request(name) for name in "abc"))
    broken = engine._target.model if part == "target" else engine._drafts._serving.drafter
    method = "forward" if part == "target" else "draft"
    failing_once(monkeypatch, broken, method, torch.OutOfMemoryError("no memory left"))
    done = serve(engine, *(request(name) for name in "abc"))
    for name in "ab":
        assert done[name].finish_reason == "error"
        assert "no memory left" in (done[name].error or "")
        assert done[name].output_token_ids == expected[name][: len(done[name].output_token_ids)] != ()
    assert done["c"].output_token_ids == expected["c"]
    assert engine.running == 0


@pytest.mark.parametrize("ahead", [False, True])
def test_a_tokenizer_that_fails_at_a_request_ends_that_one_alone(
    new_engine: Callable[..., Engine], ahead: bool
) -> None:
    engine = new_engine(max_batch=3, ahead=ahead)
    expected = tokens(engine, request("a"), request("b"))
    decode = engine.tokenizer.decode

    def fails_at_9(token_ids: list[int], **options: Any) -> str:
        if 9 in token_ids:
            raise IndexError("piece id is out of range")
        return str(decode(token_ids, **options))

    engine.tokenizer.decode = fails_at_9
    bad = [request(name, (1, 9)) for name in ("admitted", "running", "waiting")]
    for each in (request("a"), bad[0], bad[1], request("b"), bad[2]):
        engine.submit(each)
    engine.abort("waiting")
    done = finished(drain(engine))
    for name in ("admitted", "running"):
        assert (done[name].finish_reason, done[name].error) == (
            "error",
            "IndexError: piece id is out of range",
        )
    assert done["waiting"].finish_reason == "abort"
    assert {name: done[name].output_token_ids for name in "ab"} == expected
    assert (engine.running, engine.has_work()) == (0, False)


def test_a_failure_at_one_request_loses_no_output_of_another(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine()
    expected = tokens(engine, request("a", max_tokens=1))["a"]
    original = RunningSequence.commit

    def commit(self: RunningSequence, *arguments: Any) -> RequestOutput:
        if self.request.request_id == "b":
            raise RuntimeError("a bug")
        return original(self, *arguments)

    monkeypatch.setattr(RunningSequence, "commit", commit)
    done = serve(engine, request("a", max_tokens=1), request("b"))
    assert (done["a"].finish_reason, done["a"].output_token_ids) == ("length", expected)
    assert (done["b"].finish_reason, done["b"].error) == ("error", "RuntimeError: a bug")
    done = serve(engine, request("b"), request("c", max_tokens=2))
    assert (done["b"].finish_reason, done["c"].finish_reason) == ("error", "length")
