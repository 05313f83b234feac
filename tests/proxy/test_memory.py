"""What the proxy process holds in memory, whatever clients send and do not read; and its own small port."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager

import aiohttp
import psutil
import pytest
from aiohttp import web
from yarl import URL

from tests.conftest import PATIENCE_SECONDS
from tests.proxy.serving import proxied, served
from tests.proxy.test_command import proxy

pytestmark = pytest.mark.slow

PATH = "/v1/chat/completions"
LARGE = 200_000_000
PIECE = b"a" * 100_000


async def counting(request: web.BaseRequest) -> web.StreamResponse:
    """The bytes of the request; on a GET, a stream of LARGE bytes."""
    if request.method == "GET":
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for _ in range(LARGE // len(PIECE)):
            await response.write(PIECE)
        return response
    size_bytes = 0
    async for piece in request.content.iter_any():
        size_bytes += len(piece)
    return web.Response(text=str(size_bytes))


@contextmanager
def in_front_of(upstream: str, *arguments: str) -> Iterator[tuple[str, psutil.Process]]:
    with proxy("--upstream", upstream, "--engine", "vllm", *arguments) as (process, url):
        yield url, psutil.Process(process.pid)


@pytest.mark.parametrize("path", ["/files", PATH])
def test_a_body_larger_than_memory_may_hold_is_passed_on_whole(path: str) -> None:
    async def body() -> AsyncIterator[bytes]:
        for _ in range(LARGE // len(PIECE)):
            yield PIECE

    async def scenario() -> None:
        async with served(counting) as upstream, aiohttp.ClientSession() as client:
            with in_front_of(upstream) as (url, process):
                before = process.memory_info().rss
                async with client.post(url + path, data=body()) as answer:
                    assert await answer.text() == str(LARGE)
                assert process.memory_info().rss - before < 40_000_000

    asyncio.run(scenario())


def test_answers_that_nobody_reads_wait_upstream() -> None:
    async def scenario() -> None:
        async with served(counting) as upstream:
            with in_front_of(upstream) as (url, process), ExitStack() as stack:
                before = process.memory_info().rss
                place = (str(URL(url).host), int(URL(url).port or 0))
                for _ in range(30):
                    client = stack.enter_context(socket.create_connection(place))
                    client.sendall(b"GET /stream HTTP/1.1\r\nHost: a\r\n\r\n")
                for _ in range(20):
                    await asyncio.sleep(0.1)
                    assert process.memory_info().rss - before < 60_000_000

    asyncio.run(scenario())


def test_what_there_is_no_room_for_passes_unrecorded_and_room_is_given_back() -> None:
    asked, answer = asyncio.Semaphore(0), asyncio.Event()

    async def engine(request: web.BaseRequest) -> web.StreamResponse:
        asked.release()
        await answer.wait()
        return web.json_response({"model": "m", "choices": [], "usage": {"completion_tokens": 1}})

    async def scenario() -> None:
        async with proxied(engine, engine="other", method="none", max_held_bytes=25_000) as setup:

            async def ask() -> None:
                async with setup.client.post(setup.proxy + PATH, json={"padding": "x" * 10_000}) as found:
                    assert found.status == 200

            for _ in range(2):
                asking = [asyncio.create_task(ask()) for _ in range(4)]
                async with asyncio.timeout(PATIENCE_SECONDS):
                    for _ in asking:
                        await asked.acquire()
                answer.set()
                await asyncio.gather(*asking)
                answer.clear()
            assert {len(seen.body) for seen in setup.seen} == {len('{"padding": ""}') + 10_000}
            assert len(await setup.sidecar.wait_for(4)) == 4
            async with setup.client.get(setup.admin + "/driftguard/metrics") as metrics:
                assert 'requests_total{outcome="answered",record="no_room"} 4.0' in await metrics.text()

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("host", "status"),
    [("127.0.0.1:{}", 200), ("localhost:{}", 200), ("evil.example", 403), ("127.0.0.1.evil.example:{}", 403)],
)
def test_its_own_port_is_read_under_its_own_names_only(host: str, status: int) -> None:
    """A name that is resolved anew to 127.0.0.1 lets a web page read what is there."""

    async def unasked(_: web.BaseRequest) -> web.StreamResponse:
        raise AssertionError

    async def scenario() -> None:
        async with proxied(unasked) as setup:
            for path in ("/driftguard/healthz", "/driftguard/metrics"):
                headers = {"Host": host.format(URL(setup.admin).port)}
                async with setup.client.get(setup.admin + path, headers=headers) as answer:
                    assert answer.status == status

    asyncio.run(scenario())
