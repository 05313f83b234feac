"""Connections that cost the proxy without asking, and answers that take long without costing it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from yarl import URL

from driftguard.proxy import connections as proxy_connections
from driftguard.proxy.connections import limits_of
from driftguard_http import ConnectionLimits
from tests.conftest import PATIENCE_SECONDS
from tests.proxy.serving import Setup, proxied

PATH = "/v1/chat/completions"
ENOUGH = 50_000_000  # more than all buffers on the way hold
Ends = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def ok(_: web.BaseRequest) -> web.StreamResponse:
    return web.Response(body=b"ok")


async def endless(request: web.BaseRequest) -> web.StreamResponse:
    """More than anybody reads of /large; else "ok"."""
    if request.path != "/large":
        return await ok(request)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
    await response.prepare(request)
    for _ in range(ENOUGH // 100_000):
        await response.write(b"a" * 100_000)
    return response


@asynccontextmanager
async def connections(setup: Setup, count: int) -> AsyncIterator[list[Ends]]:
    url = URL(setup.proxy)
    ends = [await asyncio.open_connection(url.host, url.port) for _ in range(count)]
    try:
        yield ends
    finally:
        for _, writer in ends:
            writer.close()


async def until_closed(ends: Ends) -> bytes:
    """What came before."""
    came = b""
    try:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while part := await ends[0].read(65_536):
                came += part
    except ConnectionError:
        pass
    return came


async def until_answered(setup: Setup) -> None:
    for _ in range(int(PATIENCE_SECONDS * 20)):
        if await is_answered(setup):
            return
        await asyncio.sleep(0.05)
    raise AssertionError("nobody is answered")


async def is_answered(setup: Setup) -> bool:
    try:
        async with aiohttp.ClientSession() as client, client.get(setup.proxy + "/") as answer:
            return await answer.read() == b"ok"
    except aiohttp.ClientError:  # where the proxy is at work for all others just then
        return False


async def closed_for_room(setup: Setup) -> float:
    async with setup.client.get(setup.admin + "/driftguard/metrics") as answer:
        lines = (await answer.text()).splitlines()
    name = "driftguard_proxy_connections_closed_for_room_total "
    return next(float(line.removeprefix(name)) for line in lines if line.startswith(name))


def test_headers_that_never_end_are_not_waited_for() -> None:
    async def drip(ends: Ends) -> None:
        try:
            while True:
                ends[1].write(b"G")
                await ends[1].drain()
                await asyncio.sleep(0.02)
        except ConnectionError:
            pass

    async def scenario() -> None:
        async with (
            proxied(ok, limits=ConnectionLimits(header_seconds=0.3)) as setup,
            connections(setup, 4) as (silent, half, dripping, second),
        ):
            half[1].write(b"GET / HTTP/1.1\r\nHost: a\r\n")
            second[1].write(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n")
            assert (await second[0].readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            second[1].write(b"GET / HTTP/1.1\r\n")
            task = asyncio.create_task(drip(dripping))
            assert [await until_closed(ends) for ends in (silent, half, second)] == [b""] * 3
            async with asyncio.timeout(PATIENCE_SECONDS):
                await task

    asyncio.run(scenario())


def test_headers_are_refused_when_they_are_too_large_all_together() -> None:
    line = b"x: " + b"y" * 8_000 + b"\r\n"

    async def scenario() -> None:
        async with proxied(ok) as setup, connections(setup, 1) as (ends,):
            ends[1].write(b"GET / HTTP/1.1\r\nHost: a\r\n")
            try:
                for _ in range(100):  # each within the limit of a line
                    ends[1].write(line)
                    await ends[1].drain()
                ends[1].write(b"\r\n")
            except ConnectionError:
                pass
            assert b" 200 " not in await until_closed(ends)
            assert await is_answered(setup)
            assert len(setup.seen) == 1

    asyncio.run(scenario())


def test_whoever_opens_many_connections_shuts_nobody_else_out() -> None:
    async def scenario() -> None:
        limits = ConnectionLimits(most=10, header_seconds=60)
        async with proxied(ok, limits=limits) as setup, connections(setup, 40) as many:
            for _, writer in many:
                writer.write(b"GET / HTTP/1.1\r\n")
            for _ in range(10):
                assert await is_answered(setup)
            await until_closed(many[0])  # those that idled longest made room
            assert await closed_for_room(setup) >= 30

    asyncio.run(scenario())


@pytest.mark.parametrize(
    "request_",
    [
        b"POST / HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf",
        b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\nhalf",
        b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n",
    ],
)
def test_half_a_body_and_answers_that_nobody_reads_shut_nobody_else_out(request_: bytes) -> None:
    async def scenario() -> None:
        async with (
            proxied(endless, limits=ConnectionLimits(most=5, header_seconds=60), engine="vllm") as setup,
            connections(setup, 15) as many,
        ):
            for _, writer in many:
                writer.write(request_)
            for _ in range(5):
                await until_answered(setup)

    asyncio.run(scenario())


def test_connections_that_wait_for_their_first_token_are_not_closed_for_newer_ones() -> None:
    """Nor for being silent longer than headers and readers may be."""
    asked, answer = asyncio.Semaphore(0), asyncio.Event()

    async def thinking(request: web.BaseRequest) -> web.StreamResponse:
        asked.release()
        await answer.wait()
        return await ok(request)

    async def scenario() -> None:
        limits = ConnectionLimits(most=3, header_seconds=2.0, unread_seconds=0.2)
        async with (
            proxied(thinking, limits=limits, engine="vllm") as setup,
            connections(setup, 3) as waiting,
        ):
            for _, writer in waiting:
                writer.write(
                    b"POST " + PATH.encode() + b" HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\n{}"
                )
                await asyncio.wait_for(asked.acquire(), PATIENCE_SECONDS)
            async with connections(setup, 3) as newer:
                assert [await until_closed(ends) for ends in newer] == [b""] * 3
            await asyncio.sleep(limits.header_seconds + 0.5)
            answer.set()
            for reader, _ in waiting:
                assert b" 200 " in await asyncio.wait_for(reader.readuntil(b"ok"), PATIENCE_SECONDS)

    asyncio.run(scenario())


def test_an_answer_that_nobody_reads_is_given_up_here_and_upstream() -> None:
    ended = asyncio.Event()

    async def engine(request: web.BaseRequest) -> web.StreamResponse:
        try:
            return await endless(request)
        finally:
            ended.set()

    async def scenario() -> None:
        async with (
            proxied(engine, limits=ConnectionLimits(unread_seconds=0.3)) as setup,
            connections(setup, 1) as (unread,),
        ):
            unread[1].write(b"GET /large HTTP/1.1\r\nHost: a\r\n\r\n")
            async with asyncio.timeout(PATIENCE_SECONDS):
                await ended.wait()

    asyncio.run(scenario())


def test_an_answer_that_is_read_slowly_is_passed_on_whole() -> None:
    """In several times the seconds that an answer of which nothing is read is given."""

    async def scenario() -> None:
        async with (
            proxied(endless, limits=ConnectionLimits(unread_seconds=0.5)) as setup,
            setup.client.get(setup.proxy + "/large") as answer,
        ):
            size_bytes = 0
            async for part in answer.content.iter_chunked(1_000_000):
                size_bytes += len(part)
                await asyncio.sleep(0.04)
            assert size_bytes == ENOUGH

    asyncio.run(scenario())


def test_connections_leave_descriptors_for_those_upstream(monkeypatch: pytest.MonkeyPatch) -> None:
    def few(_: Any) -> tuple[int, int]:
        return 1_000, 1_000

    monkeypatch.setattr("resource.getrlimit", few)
    assert limits_of(4_096).allowed == 400
    assert limits_of(100).allowed == 100


async def _connect_while_accepted(url: URL) -> None:
    while True:
        (await asyncio.open_connection(url.host, url.port))[1].close()
        await asyncio.sleep(0)


def test_a_body_that_arrives_while_the_proxy_stops_is_passed_on_and_answered() -> None:
    async def scenario() -> bytes:
        async with proxied(ok, shutdown_grace_seconds=4 * PATIENCE_SECONDS) as setup:
            url = URL(setup.proxy)
            reader, writer = await asyncio.open_connection(url.host, url.port)
            writer.write(b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n" % PATH.encode())
            writer.write(b"Expect: 100-continue\r\n\r\n")
            assert await reader.readline() == b"HTTP/1.1 100 Continue\r\n"  # it is being answered
            await reader.readline()
            stopping = asyncio.create_task(setup.stop())
            with pytest.raises(OSError):
                await _connect_while_accepted(url)
            writer.write(b'{"n": 1')
            await asyncio.sleep(0.05)
            writer.write(b" }")
            async with asyncio.timeout(PATIENCE_SECONDS):
                status = await reader.readline()
                await stopping
            writer.close()
            return status

    assert asyncio.run(scenario()) == b"HTTP/1.1 200 OK\r\n"


async def _ask_once(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, body: bytes = b"{}"
) -> tuple[bytes, dict[str, str]]:
    """(status line, headers) of the answer."""
    writer.write(b"POST %s HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n\r\n" % (PATH.encode(), len(body)))
    writer.write(body)
    return await _answer(reader)


async def _answer(reader: asyncio.StreamReader) -> tuple[bytes, dict[str, str]]:
    status, *lines = (await reader.readuntil(b"\r\n\r\n")).decode().split("\r\n")[:-2]
    headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
    await reader.readexactly(int(headers["content-length"]))
    return status.encode(), headers


def test_a_request_that_comes_while_the_proxy_stops_is_answered_and_its_client_told_to_close(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A client does not know yet that the proxy stops, and keeps its connections."""
    monkeypatch.setattr(proxy_connections, "DRAIN_SECONDS", 4 * PATIENCE_SECONDS)

    async def scenario() -> None:
        async with proxied(ok, shutdown_grace_seconds=12 * PATIENCE_SECONDS) as setup:
            url = URL(setup.proxy)
            reader, writer = await asyncio.open_connection(url.host, url.port)
            async with asyncio.timeout(PATIENCE_SECONDS):
                status, headers = await _ask_once(reader, writer)
                assert (status, headers.get("connection")) == (b"HTTP/1.1 200 OK", None)
                stopping = asyncio.create_task(setup.stop())
                with pytest.raises(OSError):
                    await _connect_while_accepted(url)
                status, headers = await _ask_once(reader, writer)
                assert (status, headers.get("connection")) == (b"HTTP/1.1 200 OK", "close")
                assert await reader.read() == b""
                await stopping
            writer.close()

    asyncio.run(scenario())


def test_a_client_whose_answer_begins_while_the_proxy_stops_is_told_to_close() -> None:
    async def scenario() -> None:
        asked, go_on = asyncio.Event(), asyncio.Event()

        async def slow(request: web.BaseRequest) -> web.StreamResponse:
            asked.set()
            await go_on.wait()
            return await ok(request)

        async with proxied(slow, shutdown_grace_seconds=12 * PATIENCE_SECONDS) as setup:
            url = URL(setup.proxy)
            reader, writer = await asyncio.open_connection(url.host, url.port)
            async with asyncio.timeout(PATIENCE_SECONDS):
                asking = asyncio.create_task(_ask_once(reader, writer))
                await asked.wait()
                stopping = asyncio.create_task(setup.stop())
                with pytest.raises(OSError):
                    await _connect_while_accepted(url)
                go_on.set()
                status, headers = await asking
                assert (status, headers.get("connection")) == (b"HTTP/1.1 200 OK", "close")
                await stopping
            writer.close()

    asyncio.run(scenario())


def test_connections_that_nobody_uses_do_not_keep_a_proxy_from_stopping(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proxy_connections, "DRAIN_SECONDS", 0.05)

    async def scenario() -> None:
        async with proxied(ok, shutdown_grace_seconds=12 * PATIENCE_SECONDS) as setup:
            url = URL(setup.proxy)
            unused, used = [await asyncio.open_connection(url.host, url.port) for _ in range(2)]
            await _ask_once(*used)
            async with asyncio.timeout(PATIENCE_SECONDS):
                await setup.stop()
                assert [await reader.read() for reader, _ in (unused, used)] == [b"", b""]
            for _, writer in (unused, used):
                writer.close()

    asyncio.run(scenario())
