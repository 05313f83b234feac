"""What happens when clients leave, the queue fills, the engine dies, the process is told to stop."""

from __future__ import annotations

import json
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from driftguard_engine.core import DraftInfo
from driftguard_engine.engine import Engine
from driftguard_engine.server import app as server_app
from driftguard_engine.server import runner
from driftguard_engine.server.app import ServeOptions
from driftguard_engine.server.dependencies import TOKENIZED_AT_ONCE

from tests.engine.server import fake_process
from tests.engine.server.fake_engine import TOKEN_TEXT, FakeEngine
from tests.engine.server.processes import serving_process
from tests.engine.server.serving import PATIENCE_SECONDS, served, wait_until
from tests.engine.server.tiny_models import CHAT_TEMPLATE, byte_tokenizer
from tests.forked import forked


@pytest.fixture
def dead_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine, the test gets to see what a dead engine answers before its server ends."""
    monkeypatch.setattr(server_app, "FAILURE_GRACE_SECONDS", 600.0)


@contextmanager
def sending(client: httpx.Client, path: str, request: dict[str, Any]) -> Iterator[None]:
    """A client that has sent a request, and leaves at the end of the block without its answer."""
    body = json.dumps(request).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection((client.base_url.host, client.base_url.port or 0)) as connection:
        connection.sendall(head.encode() + body)
        yield


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_frees_its_slots(client: httpx.Client, fake: FakeEngine, stream: bool) -> None:
    fake.paused.set()
    with sending(client, "/v1/completions", {"prompt": ["a", "b"], "stream": stream}):
        wait_until(lambda: fake.running == 2, "both requests run")
    wait_until(lambda: len(fake.aborted) == 2, "both requests were aborted")
    wait_until(lambda: fake.running == 0, "the slots are free")


def test_a_finished_request_is_not_aborted(client: httpx.Client, fake: FakeEngine) -> None:
    client.post("/v1/completions", json={"prompt": "a", "stream": True, "max_tokens": 2}).raise_for_status()
    client.post("/v1/completions", json={"prompt": "a", "max_tokens": 2}).raise_for_status()
    assert fake.aborted == []


def test_a_full_queue_answers_429_and_keeps_nothing_of_the_refused_request() -> None:
    fake = FakeEngine(byte_tokenizer(), max_waiting=3)
    fake.paused.set()
    with served(fake) as client, ThreadPoolExecutor(1) as pool:
        first = pool.submit(client.post, "/v1/completions", json={"prompt": ["a", "b"], "max_tokens": 1})
        wait_until(lambda: fake.running == 2, "two requests are in")
        refused = client.post("/v1/completions", json={"prompt": ["c", "d"]})
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.json()["error"]["code"] == "queue_full"
        assert [request.prompt_token_ids for request in fake.seen] == [
            tuple(byte_tokenizer().encode(prompt)) for prompt in "ab"
        ]
        fake.paused.clear()
        assert first.result().status_code == 200


@pytest.mark.usefixtures("dead_for_long")
def test_a_dead_engine_fails_its_requests_and_says_so(fake: FakeEngine) -> None:
    fake.paused.set()
    with served(fake) as client, ThreadPoolExecutor(2) as pool:
        whole = pool.submit(client.post, "/v1/completions", json={"prompt": "a"})
        streamed = pool.submit(client.post, "/v1/completions", json={"prompt": "a", "stream": True})
        wait_until(lambda: fake.running == 2, "two requests run")
        assert client.get("/health").json() == {"status": "ok"}
        assert client.head("/health").status_code == 200
        fake.step_error = RuntimeError("device lost")
        fake.paused.clear()
        assert whole.result().status_code == 503
        assert "device lost" in whole.result().json()["error"]["message"]
        assert '"code":"engine_unavailable"' in streamed.result().text
        health = client.get("/health")
        assert health.status_code == 503
        assert "device lost" in health.json()["detail"]
        refused = client.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert fake.stopped_loading == "failed"


@pytest.mark.usefixtures("dead_for_long")
def test_an_engine_whose_every_step_fails_is_dead(fake: FakeEngine) -> None:
    with served(fake) as client:
        fake.request_error = "device lost"
        for _ in range(19):
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 500
        fake.request_error = None
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        fake.request_error = "device lost"
        fake.paused.set()
        with ThreadPoolExecutor(1) as pool:
            failed = pool.submit(client.post, "/v1/completions", json={"prompt": ["a"] * 20})
            wait_until(lambda: fake.running == 20, "all wait for one step")
            fake.paused.clear()
            assert failed.result().status_code == 500
        for _ in range(19):
            assert client.get("/health").status_code == 200
            assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 500
        wait_until(lambda: client.get("/health").status_code == 503, "the engine is given up")


@pytest.mark.usefixtures("dead_for_long")
@pytest.mark.parametrize("is_first", [True, False])
def test_one_client_whose_every_request_fails_does_not_end_the_engine(
    fake: FakeEngine, is_first: bool
) -> None:
    with served(fake) as client:
        if not is_first:
            client.post("/v1/completions", json={"prompt": "a"}).raise_for_status()
        fake.request_error, fake.fails_at = "no usable logits", byte_tokenizer().encode("b")[0]
        for _ in range(45):
            answer = client.post("/v1/completions", json={"prompt": "b"})
            assert answer.status_code == 500
            assert "no usable logits" in answer.json()["error"]["message"]
        assert client.get("/health").status_code == 200
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        assert 'reason="error"} 45.0' in client.get("/metrics").text  # those of the engine's own are none


@pytest.mark.usefixtures("dead_for_long")
def test_a_draft_whose_every_step_fails_ends_the_engine_whatever_is_answered_without_it(
    real_engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise torch.OutOfMemoryError("no memory left for the draft")

    assert real_engine._drafts.drafter is not None
    monkeypatch.setattr(real_engine._drafts.drafter, "draft", fail)
    asked: dict[str, Any] = {"prompt": "a", "max_tokens": 4}
    with served(real_engine) as client:
        for _ in range(20):  # as a probe of the target does, between the requests of users
            plain = client.post("/v1/completions", json=asked | {"num_speculative_tokens": 0})
            assert plain.status_code == 200
            failed = client.post("/v1/completions", json=asked)
            assert "no memory left for the draft" in failed.json()["error"]["message"]
        wait_until(lambda: client.get("/health").status_code == 503, "the engine is given up")


@pytest.mark.usefixtures("dead_for_long")
def test_a_lost_device_ends_the_process_after_its_requests_have_their_answer(fake: FakeEngine) -> None:
    with served(fake) as client:
        fake.request_error = fake.lost = "CUDA error: an illegal memory access was encountered"
        answer = client.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 500
        assert "illegal memory access" in answer.json()["error"]["message"]
        wait_until(lambda: client.get("/health").status_code == 503, "the engine is given up")
        assert "the device is lost" in client.get("/health").json()["detail"]


@pytest.mark.usefixtures("dead_for_long")
def test_a_step_that_does_not_end_ends_the_engine(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "LOOK_EVERY_SECONDS", 0.01)
    with served(fake) as client:
        assert client.post("/v1/completions", json={"prompt": "a"}).status_code == 200
        fake.step_ends.clear()
        try:
            answer = client.post("/v1/completions", json={"prompt": "a"})
            assert answer.status_code == 503
            assert "a step has not ended" in answer.json()["error"]["message"]
            assert "a step has not ended" in client.get("/health").json()["detail"]
        finally:
            fake.step_ends.set()


class Held:
    """A tokenizer whose texts take until `released`."""

    chat_template = CHAT_TEMPLATE

    def __init__(self) -> None:
        self.released = threading.Event()
        self.texts: list[str] = []
        self._tokenizer = byte_tokenizer(CHAT_TEMPLATE)

    def get_vocab(self) -> dict[str, int]:
        vocabulary: dict[str, int] = self._tokenizer.get_vocab()
        return vocabulary

    def apply_chat_template(self, *arguments: Any, **options: Any) -> str:
        return str(self._tokenizer.apply_chat_template(*arguments, **options))

    def encode(self, text: str, **_: Any) -> list[int]:
        self.texts.append(text)
        self.released.wait(PATIENCE_SECONDS)
        ids: list[int] = self._tokenizer.encode(text)
        return ids


def test_a_server_that_is_busy_with_long_prompts_answers_whoever_watches_it() -> None:
    """More texts are sent at once than there are threads that work for requests."""
    held = Held()
    prompts = 60
    body = {"prompt": "abc", "max_tokens": 1}
    with served(FakeEngine(held)) as client, ThreadPoolExecutor(prompts) as pool:
        try:
            answers = [pool.submit(client.post, "/v1/completions", json=body) for _ in range(prompts)]
            wait_until(lambda: len(held.texts) >= TOKENIZED_AT_ONCE, "as many as may be are tokenized")
            for path in ("/health", "/metrics", "/v1/models", "/admin/info"):
                assert client.get(path, timeout=10).status_code == 200, path
        finally:
            held.released.set()
        assert {answer.result().status_code for answer in answers} == {200}


def test_a_server_that_is_asked_for_many_drafts_serves_whoever_asks_for_something_else(
    fake: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More are asked for at once than there are threads that work for requests."""
    drafts, released, loaded = 60, threading.Event(), []

    def load(directory: str, version: str | None) -> DraftInfo:
        loaded.append(directory)
        released.wait(PATIENCE_SECONDS)
        return fake.draft

    monkeypatch.setattr(fake, "load_draft", load)
    with served(fake) as client, ThreadPoolExecutor(drafts) as pool:
        try:
            body = {"directory": "/models/other"}
            answers = [pool.submit(client.post, "/admin/drafts", json=body) for _ in range(drafts)]
            wait_until(lambda: client.get("/health").is_success and bool(loaded), "one is being loaded")
            for path in ("/metrics", "/admin/info"):
                assert client.get(path, timeout=10).status_code == 200, path
            prompt = {"prompt": "abc", "max_tokens": 1}
            assert client.post("/v1/completions", json=prompt, timeout=10).status_code == 200
        finally:
            released.set()
        assert {answer.result().status_code for answer in answers} == {201}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_a_request_whose_client_left_while_it_waited_is_not_tokenized(path: str) -> None:
    held = Held()
    prompt = {"messages": [{"role": "user", "content": "left"}]} if "chat" in path else {"prompt": "left"}
    body = {"prompt": "abc", "max_tokens": 1}
    fake = FakeEngine(held)
    with served(fake) as client, ThreadPoolExecutor(TOKENIZED_AT_ONCE) as pool:
        try:
            answers = [
                pool.submit(client.post, "/v1/completions", json=body) for _ in range(TOKENIZED_AT_ONCE)
            ]
            wait_until(lambda: len(held.texts) == TOKENIZED_AT_ONCE, "as many as may be are tokenized")
            with sending(client, path, prompt):
                assert client.get("/health").status_code == 200  # so its body has been read
            assert client.get("/health").status_code == 200  # so its end has been read
        finally:
            held.released.set()
        assert {answer.result().status_code for answer in answers} == {200}
        assert client.post("/v1/completions", json=body).status_code == 200  # tokenized after it, if it were
    assert held.texts == ["abc"] * (TOKENIZED_AT_ONCE + 1)
    assert {len(request.prompt_token_ids) for request in fake.seen} == {3}


def test_shutdown_lets_running_requests_finish(fake: FakeEngine) -> None:
    fake.paused.set()
    with ThreadPoolExecutor(1) as pool:
        with served(fake) as client:
            running = pool.submit(httpx.post, f"{client.base_url}/v1/completions", json={"prompt": "a"})
            wait_until(lambda: fake.running == 1, "the request runs")
            threading.Timer(0.3, fake.paused.clear).start()
        assert running.result().json()["choices"][0]["text"] == TOKEN_TEXT * 16


def test_shutdown_aborts_after_its_limit_and_still_answers(fake: FakeEngine) -> None:
    fake.paused.set()
    with ThreadPoolExecutor(1) as pool:
        with served(fake, options=ServeOptions(shutdown_limit_seconds=0.1)) as client:
            running = pool.submit(httpx.post, f"{client.base_url}/v1/completions", json={"prompt": "a"})
            wait_until(lambda: fake.running == 1, "the request runs")
        assert running.result().status_code == 503
        assert "shutting down" in running.result().json()["error"]["message"]
    assert len(fake.aborted) == 1


def test_the_process_of_a_dead_engine_exits_with_1_for_its_supervisor() -> None:
    with serving_process(fake_process.main, ["--fail"]) as (process, url, _):
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 503
        assert httpx.get(f"{url}/health").status_code == 503
        assert process.wait(60) == 1


def test_the_process_of_an_engine_that_hangs_exits_with_1_although_its_step_never_ends() -> None:
    with serving_process(fake_process.main, ["--hang"]) as (process, url, _):
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "a"}).status_code == 503
        assert process.wait(60) == 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_process_with_0(number: signal.Signals) -> None:
    with serving_process(fake_process.main, []) as (process, url, _):
        assert httpx.get(f"{url}/health").status_code == 200
        process.send_signal(number)
        assert process.wait(60) == 0


def test_a_signal_just_before_it_serves_ends_the_process_too(tmp_path: Path) -> None:
    with forked(fake_process.main, ["--signalled"], tmp_path / "log") as process:
        assert process.wait(60) == 0
