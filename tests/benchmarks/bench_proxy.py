"""The proxy against no proxy, and against the least that its HTTP library can do.

`python -m tests.benchmarks.bench_proxy [--seconds N] [--connections N] [--streams N]`: requests/s of small
answers, and the time to the first event of a streamed one. "bare" passes bytes on with the same library and
looks at nothing. Client, engine and proxies share this machine's cores; the three ways take turns, so that
what else the machine does meets all of them. CPU time says what a proxy would do on a core of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import cast

import aiohttp
import psutil
import uvloop
from aiohttp import web
from yarl import URL

from tests.proxy.engines import Json, vllm

ROUNDS = 10
PATH = "/v1/chat/completions"
CHAT: Json = {"model": "m", "messages": [{"role": "user", "content": "hello there"}], "max_tokens": 53}
USAGE: Json = {"stream_options": {"include_usage": True}}
END = b"\r\n\r\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="of each turn; each way has ten")
    parser.add_argument("--connections", type=int, default=32, help="open at a time")
    parser.add_argument("--streams", type=int, default=100, help="streamed answers of each turn")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bare", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        uvloop.run(_serve_engine())
    elif options.bare:
        uvloop.run(_serve_bare(options.bare))
    else:
        print(
            f"{platform.machine()}, {os.cpu_count()} cores shared by client, engine and proxies", flush=True
        )
        with ExitStack() as stack:
            uvloop.run(_compare(_start_all(stack), options))


@dataclass
class Way:
    """One way to the engine, and what was measured on it."""

    name: str
    port: int
    process: psutil.Process
    rates: list[float] = field(default_factory=list)  # requests/s
    cpu_seconds: list[float] = field(default_factory=list)  # per request
    first_seconds: list[float] = field(default_factory=list)


def _start_all(stack: ExitStack) -> list[Way]:
    this = [sys.executable, "-m", "tests.benchmarks.bench_proxy"]
    proxy = [
        sys.executable,
        "-m",
        "driftguard",
        "proxy",
        "--port",
        "0",
        "--engine",
        "vllm",
        "--draft",
        "small",
    ]
    engine = stack.enter_context(_started("direct", *this, "--engine"))
    url = f"http://127.0.0.1:{engine.port}"
    bare = stack.enter_context(_started("bare", *this, "--bare", url))
    return [
        engine,
        bare,
        stack.enter_context(_started("proxy", *proxy, "--upstream", url, "--sidecar", url)),
    ]


@contextmanager
def _started(name: str, *command: str) -> Iterator[Way]:
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            ready = next(line for line in process.stdout if "ready on " in line)
            port = URL(ready.partition("ready on ")[2].split()[0]).port
            yield Way(name, port or 0, psutil.Process(process.pid))
        finally:
            process.terminate()


class _Engine(asyncio.Protocol):
    """Answers every POST at once, as vLLM does; a stream where the request asks for one."""

    def __init__(self) -> None:
        whole, events = vllm(CHAT), vllm(CHAT | {"stream": True})
        more = vllm(CHAT | {"stream": True} | USAGE)
        assert isinstance(whole, bytes)
        self._whole = _plain(whole)
        self._stored = _plain(b'{"accepted":0,"duplicates":0}')
        self._streams = [_stream(events), _stream(more)]
        self._text = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        self._text += data
        header, found, body = self._text.partition(END)
        if found and len(body) >= int(header.lower().partition(b"content-length: ")[2].split(b"\r")[0]):
            self._text = b""
            self._transport.write(self._answer(header, body))

    def _answer(self, header: bytes, body: bytes) -> bytes:
        if b"/records" in header:  # it plays the sidecar too
            return self._stored
        if b'"stream": true' in body:
            return self._streams[b"include_usage" in body]
        return self._whole


def _plain(body: bytes) -> bytes:
    return _response(b"application/json", b"content-length: %d" % len(body), body)


def _response(kind: bytes, length: bytes, body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-type: " + kind + b"\r\n" + length + END + body


def _stream(events: bytes | list[bytes]) -> bytes:
    chunks = b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events if isinstance(event, bytes))
    return _response(b"text/event-stream", b"transfer-encoding: chunked", chunks + b"0" + END)


async def _serve_engine() -> None:
    server = await asyncio.get_running_loop().create_server(_Engine, "127.0.0.1", 0)
    print(f"ready on http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


async def _serve_bare(engine: str) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:

        async def handle(request: web.BaseRequest) -> web.StreamResponse:
            body = await request.read()
            async with session.post(engine + request.raw_path, data=body) as answer:
                if answer.content_type == "application/json":
                    return web.Response(body=await answer.read(), content_type=answer.content_type)
                response = web.StreamResponse(headers={"Content-Type": answer.content_type})
                await response.prepare(request)
                async for chunk in answer.content.iter_any():
                    await response.write(chunk)
                return response

        runner = web.ServerRunner(web.Server(handle, access_log=None))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        print(f"ready on http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
        await asyncio.Event().wait()


class _Client(asyncio.Protocol):
    """Asks, and asks again when it has the whole answer."""

    count = 0

    def __init__(self) -> None:
        self._request = _request(CHAT)
        self._text = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._text += data
        header, found, body = self._text.partition(END)
        if found and len(body) >= int(header.lower().partition(b"content-length: ")[2].split(b"\r")[0]):
            self._text = b""
            _Client.count += 1
            self._transport.write(self._request)


def _request(body: Json) -> bytes:
    text = json.dumps(body).encode()
    return (
        b"POST %b HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d"
        % (PATH.encode(), len(text))
        + END
        + text
    )


async def _compare(ways: list[Way], options: argparse.Namespace) -> None:
    for way in ways:
        await _load(way, 0.5, options.connections)
        way.rates.clear()
        way.cpu_seconds.clear()
    for _ in range(ROUNDS):
        for way in ways:
            await _load(way, options.seconds, options.connections)
        for _ in range(options.streams):
            for way in ways:
                way.first_seconds.append(await _first_event(way))
    direct = ways[0]
    for way in ways:
        rate, cpu = statistics.median(way.rates), statistics.median(way.cpu_seconds)
        ratio = statistics.median(a / b for a, b in zip(way.rates, direct.rates, strict=True))
        first = statistics.quantiles(way.first_seconds, n=100)
        added = statistics.median(a - b for a, b in zip(way.first_seconds, direct.first_seconds, strict=True))
        print(
            f"{way.name:6} {rate:8,.0f} requests/s ({ratio:.3f} of direct); {1e6 * cpu:5.0f} us CPU each, so "
            f"{1 / cpu:7,.0f}/s on a core of its own; first event p50 {1e3 * first[49]:.2f}, "
            f"p99 {1e3 * first[98]:.2f} ms (median added {1e3 * added:.2f})"
        )


async def _load(way: Way, seconds: float, connections: int) -> None:
    loop = asyncio.get_running_loop()
    made = [await loop.create_connection(_Client, "127.0.0.1", way.port) for _ in range(connections)]
    began, count, cpu = time.perf_counter(), _Client.count, sum(way.process.cpu_times()[:2])
    await asyncio.sleep(seconds)
    answered = _Client.count - count
    way.rates.append(answered / (time.perf_counter() - began))
    way.cpu_seconds.append((sum(way.process.cpu_times()[:2]) - cpu) / max(answered, 1))
    for transport, _ in made:
        transport.close()


async def _first_event(way: Way) -> float:
    """Seconds from a request to the first event of its answer, on a connection that is open already."""
    reader, writer = await asyncio.open_connection("127.0.0.1", way.port)
    began = time.perf_counter()
    writer.write(_request(CHAT | {"stream": True}))
    await reader.readuntil(END)
    await reader.readuntil(b"\n\n")
    seconds = time.perf_counter() - began
    await reader.readuntil(b"\r\n0" + END)
    writer.close()
    return seconds


if __name__ == "__main__":
    main()
