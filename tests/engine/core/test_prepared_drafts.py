"""A draft's steps are made before requests get it, one between two steps of the requests that run."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from driftguard_engine import engine as engine_module
from driftguard_engine.core import (
    DraftInfo,
    EngineError,
    EngineUnavailable,
    InvalidModel,
    Request,
    UnknownDraft,
)
from driftguard_engine.decode.graphs import Runners
from driftguard_engine.decode.step import Shape
from driftguard_engine.drafters.base import Drafter
from driftguard_engine.engine import Engine

from tests.engine.core.tiny import drain, finished, request, serve, tokens
from tests.engine.server.serving import PATIENCE_SECONDS, wait_until


class Made:
    """The steps that were made, as threads see it: on CUDA each is a capture."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.by: list[int] = []  # threads
        self.failure: Exception | None = None
        original = Runners.runner

        def runner(runners: Runners, *given: Any) -> Any:
            self.by.append(threading.get_ident())
            if self.failure is not None:
                raise self.failure
            return original(runners, *given)

        monkeypatch.setattr(Runners, "runner", runner)


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> Made:
    return Made(monkeypatch)


class Gate:
    """Before each step of a draft that is made, its loader waits for a permit."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self._permits = threading.Semaphore(0)
        self.waiting: list[Shape] = []
        original = engine._decoder.shapes

        def shapes(drafter: Drafter | None) -> Iterator[Shape]:
            for shape in original(drafter):
                self.waiting.append(shape)
                assert self._permits.acquire(timeout=PATIENCE_SECONDS)
                yield shape

        monkeypatch.setattr(engine._decoder, "shapes", shapes)

    def let(self, count: int) -> None:
        self._permits.release(count)

    def wait(self, count: int) -> None:
        wait_until(lambda: len(self.waiting) == count, f"the loader asks for permit {count}")


ALL = 10_000
Load = Callable[[Engine, str], Future[DraftInfo]]


@pytest.fixture
def load(models: Path) -> Iterator[Load]:
    """In another thread: the draft that is the target itself, under the given version."""
    with ThreadPoolExecutor(2) as pool:
        yield lambda engine, version: pool.submit(engine.load_draft, str(models / "llama"), version)


def shapes_of_traffic() -> Iterator[list[Request]]:
    """Alone and together, with each K that a request may ask for, with and without top-k."""
    for count in (1, 3, 4):
        for drafts in (None, 0, 1, 2, 5, 7, 16):
            way: dict[str, Any] = {"num_speculative_tokens": drafts, "max_tokens": 20, "temperature": 1.0}
            narrow = way | {"top_k": 5}
            yield [request(f"{row}", [7, row], **narrow if row == 2 else way) for row in range(count)]
    yield [request("narrow", top_k=3, temperature=1.0)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "adaptive"), [("draft_model", False), ("draft_model", True), ("ngram", False), ("none", False)]
)
def test_no_step_of_a_request_waits_until_it_is_made(
    new_engine: Callable[..., Engine], models: Path, made: Made, first: str, adaptive: bool
) -> None:
    engine = new_engine(ahead=True, drafter=first, adaptive_k=adaptive)
    at_start = engine.draft.version
    made.by.clear()
    assert all(serve(engine, *asked) for asked in shapes_of_traffic())
    assert made.by == []
    engine.load_draft(str(models / "llama"), "v2")
    assert made.by
    made.by.clear()
    for version in ("v2", at_start) if first != "draft_model" else ("v2",):
        engine.swap_draft(version)
        for asked in shapes_of_traffic():
            done = serve(engine, *asked)
            assert {each.finish_reason for each in done.values()} == {"length"}
            assert {each.draft.version for each in done.values() if each.counts.drafted} <= {version}
    assert made.by == []


def test_requests_go_on_while_a_draft_is_prepared_and_get_it_only_then(
    new_engine: Callable[..., Engine], made: Made, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [request(name, (5, row), 100, temperature=1.0, seed=row) for row, name in enumerate("abc")]
    expected = tokens(new_engine(ahead=True), *asked)
    engine = new_engine(ahead=True)
    first, gate = engine.draft, Gate(engine, monkeypatch)
    made.by.clear()
    for each in asked:
        engine.submit(each)
    loading, outputs = load(engine, "v2"), engine.step()
    for step in range(1, 8):
        gate.wait(step)
        assert made.by.count(threading.get_ident()) == 0
        assert len(made.by) == step - 1
        outputs += engine.step()
        assert engine.drafts == [first]
        with pytest.raises(UnknownDraft, match="v2"):
            engine.swap_draft("v2")
        gate.let(1)
    assert sum(len(output.token_ids) for output in outputs) >= 7 * len(asked)
    gate.let(ALL)
    assert loading.result(PATIENCE_SECONDS) == engine.swap_draft("v2") == engine.draft
    engine.submit(request("new"))
    done = finished(outputs + drain(engine))
    assert {name: done[name].output_token_ids for name in expected} == expected
    assert [done[name].draft.version for name in "abc"] == [first.version] * 3
    assert done["new"].draft.version == "v2"
    assert done["new"].counts.accepted == done["new"].counts.drafted > 0


def test_running_requests_keep_four_fifths_of_the_time(
    new_engine: Callable[..., Engine], models: Path, made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each capture takes 50 ms by this clock."""
    engine, pauses = new_engine(ahead=True), list[float]()
    made.by.clear()
    monkeypatch.setattr(engine_module, "time", SimpleNamespace(monotonic=lambda: len(made.by) * 0.05))
    monkeypatch.setattr(engine._no_more_drafts, "wait", pauses.append)
    engine.load_draft(str(models / "llama"), "idle")
    assert made.by
    assert pauses == []
    made.by.clear()
    engine.submit(request())
    engine.load_draft(str(models / "llama"), "v2")
    assert pauses == pytest.approx([0.2] * len(made.by))


@pytest.mark.parametrize("second", ["v2", "v3"])
def test_a_second_draft_waits_for_the_first(
    new_engine: Callable[..., Engine], made: Made, load: Load, monkeypatch: pytest.MonkeyPatch, second: str
) -> None:
    """The same one again is not prepared twice."""
    engine = new_engine(ahead=True)
    first, gate = engine.draft, Gate(engine, monkeypatch)
    made.by.clear()
    loading = load(engine, "v2")
    gate.wait(1)
    later = load(engine, second)
    gate.let(ALL)
    versions = [each.result(PATIENCE_SECONDS).version for each in (loading, later)]
    assert versions == ["v2", second]
    once = len(gate.waiting) // len({*versions})
    assert gate.waiting[:once] == gate.waiting[-once:]
    assert len(made.by) == once * len({*versions})
    assert [draft.version for draft in engine.drafts] == list(dict.fromkeys([first.version, "v2", second]))


def test_an_engine_that_stops_gives_up_what_it_prepares(
    new_engine: Callable[..., Engine], made: Made, load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = new_engine(ahead=True)
    first, gate = engine.draft, Gate(engine, monkeypatch)
    made.by.clear()
    loading, waiting = load(engine, "v2"), load(engine, "v3")
    gate.wait(1)
    engine.stop_loading()
    gate.let(1)
    for each in (loading, waiting):
        with pytest.raises(EngineUnavailable, match="draft: not loaded, because the engine stops"):
            each.result(PATIENCE_SECONDS)
    assert (engine.drafts, made.by, len(gate.waiting)) == ([first], [], 1)


def test_an_engine_that_has_failed_does_not_say_that_it_stops(
    new_engine: Callable[..., Engine], models: Path
) -> None:
    """The draft that is being loaded may be why it has: it must not be loaded again by itself."""
    engine = new_engine()
    engine.stop_loading(failed=True)
    engine.stop_loading()
    with pytest.raises(EngineError, match="draft: not loaded, because the engine has failed") as refused:
        engine.load_draft(str(models / "llama"), "v2")
    assert (refused.value.status, refused.value.code) == (500, "internal_error")


def test_a_draft_that_the_memory_has_no_room_for_is_refused_and_leaves_nothing(
    new_engine: Callable[..., Engine], models: Path, made: Made
) -> None:
    engine = new_engine(ahead=True)
    expected, first = tokens(engine, request()), engine.draft
    made.failure = torch.OutOfMemoryError("tried to allocate 2 GiB")
    with pytest.raises(InvalidModel, match=r"draft: .*llama does not fit .*\(tried to allocate 2 GiB\)"):
        engine.load_draft(str(models / "llama"), "v2")
    made.failure = None
    gc.collect()
    assert list(engine._decoder._drafted) == [engine._drafts.drafter]
    assert engine.drafts == [first]
    assert tokens(engine, request()) == expected
    assert engine.load_draft(str(models / "llama"), "v2") == engine.swap_draft("v2")


def test_a_start_without_room_for_graphs_says_which_settings_leave_more(
    new_engine: Callable[..., Engine], made: Made
) -> None:
    made.failure = torch.OutOfMemoryError("tried to allocate 2 GiB")
    with pytest.raises(
        InvalidModel,
        match=r"graphs of 4 requests .*\(tried to allocate 2 GiB\); a smaller max_batch, max_length",
    ):
        new_engine(ahead=True)


def test_a_draft_whose_steps_cannot_be_captured_serves_slower_and_says_so(
    new_engine: Callable[..., Engine], models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The capture is played: nothing here can capture."""
    engine = new_engine(ahead=True)
    expected = tokens(engine, request())
    assert engine.loop_fallback is None

    def refuse(*_: Any) -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    monkeypatch.setattr(Runners, "_captured", refuse)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    for name in ("_pool", "_side"):
        monkeypatch.setattr(engine._decoder._runners, name, object())
    engine.load_draft(str(models / "llama"), "v2")
    engine.swap_draft("v2")
    assert engine.loop_fallback == "RuntimeError: operation not permitted when stream is capturing"
    done = serve(engine, request())["r"]
    assert (done.output_token_ids, done.draft.version) == (expected["r"], "v2")
