"""The proxy as a process tells a sidecar, which is a process too, how many requests it could not record."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from driftguard.demo.processes import free_url, start_sidecar
from driftguard.records import PROBE_SEGMENT
from tests.alerting.http_receiver import wait_until
from tests.api.ingest_server import serving
from tests.conftest import PATIENCE_SECONDS
from tests.live.processes import READY_SECONDS
from tests.proxy.engines import Json, vllm
from tests.proxy.test_command import proxy

PATH = "/v1/chat/completions"
CHAT: Json = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
STOPS: Json = CHAT | {"stop": "\n"}
STREAM: Json = {"stream": True}
SEVERAL: Json = {"n": 2}
NAMES = ("--server", "chat", "--engine", "vllm", "--method", "draft_model")
FIRST_EVENT = b'data: {"choices":[{"index":0,"delta":{"content":"a"}}]}\n\n'


@contextmanager
def sidecar(directory: Path, url: str, database_url: str) -> Iterator[None]:
    settings = {"data_dir": str(directory / "data"), "database_url": database_url}
    process = start_sidecar(directory, url, "".join(f"{k} = {json.dumps(v)}\n" for k, v in settings.items()))
    try:
        process.wait_ready(f"{url}/readyz", READY_SECONDS)
        yield
    finally:
        process.stop()


async def engine(request: Request) -> Response:
    """Answers as vLLM does; fails, goes on without end or answers in plain text where it is asked to."""
    body = json.loads(await request.body())
    match body.get("user"):
        case "fails":
            return JSONResponse({"error": "out of memory"}, 500)
        case "endless":
            return StreamingResponse(endless(), media_type="text/event-stream")
        case "plain":
            return PlainTextResponse("hello")
    answer = vllm(body)
    if isinstance(answer, bytes):
        return Response(answer, media_type="application/json")
    return Response(b"".join(answer), media_type="text/event-stream")


async def endless() -> AsyncIterator[bytes]:
    while True:
        yield FIRST_EVENT
        await asyncio.sleep(0.01)


def ask(url: str, body: Json, times: int = 1, **headers: str) -> None:
    """Each on a connection of its own, so that all workers get some."""
    for _ in range(times):
        httpx.post(url + PATH, json=body, headers=headers)


def give_up(url: str, times: int) -> None:
    """While the answer comes."""
    for _ in range(times):
        with httpx.stream("POST", url + PATH, json=CHAT | STREAM | {"user": "endless"}) as answer:
            next(answer.iter_raw())


@contextmanager
def proxied(upstream: httpx.Client, sidecar_url: str, *more: str) -> Iterator[str]:
    """It is stopped in order at the end, and sends what it has not sent yet."""
    where = ("--upstream", str(upstream.base_url), "--sidecar", sidecar_url)
    with proxy(*where, *NAMES, *more) as (process, url):
        yield url
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_SECONDS) == 0


@pytest.mark.slow
def test_the_status_and_the_metrics_say_the_share_though_proxy_and_sidecar_restart(
    database_url: str, tmp_path: Path
) -> None:
    url = free_url()
    app = Starlette(routes=[Route(PATH, engine, methods=["POST"])])
    with serving(app) as upstream, ExitStack() as back:
        with sidecar(tmp_path, url, database_url), proxied(upstream, url, "--workers", "2") as through:
            ask(through, CHAT, 50)
            ask(through, STOPS, 20)
            ask(through, STOPS | STREAM, 10)
            ask(through, CHAT | SEVERAL, 3)
            ask(through, CHAT | {"user": "plain"})
            # None of these is missing from what is recorded.
            ask(through, STOPS, 4, **{"X-DriftGuard-Segment": PROBE_SEGMENT})
            ask(through, CHAT | {"user": "fails"}, 5)
            ask(through, CHAT | SEVERAL | {"user": "fails"}, 5)
            give_up(through, 2)
        with proxied(upstream, url) as through:  # the sidecar is away
            ask(through, CHAT, 14)
            ask(through, STOPS, 2)
            back.enter_context(sidecar(tmp_path, url, database_url))
        wait_until(lambda: len(httpx.get(f"{url}/api/v1/status").json()["streams"]) == 1, "the stream")
        status = httpx.get(f"{url}/api/v1/status").json()
        (found,), (stream,) = status["unrecorded"], status["streams"]
        assert found["reasons"] == {"stop_string": 32, "several_answers": 3, "malformed_answer": 1}
        assert (found["server"], found["recorded"], found["unrecorded"]) == ("chat", 64, 36)
        assert found["text"].startswith("36% of the 100 requests to chat in the last 24 hours were answered")
        assert "most of them (32) because they ended on a stop string" in found["text"]
        assert stream["text"].endswith(found["text"])
        line = 'driftguard_unrecorded_requests_ratio{reason="stop_string",server="chat"} 0.32\n'
        wait_until(lambda: line in httpx.get(f"{url}/metrics").text, "the gauge")
