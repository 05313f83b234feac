"""A proxy between a client and a test's engine, with a test's sidecar; all on real sockets."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import aiohttp
from aiohttp import web

from driftguard.proxy import app
from driftguard.proxy.counts import SharedCounts
from driftguard.proxy.listening import listeners_of
from driftguard.proxy.workers import Worker
from driftguard.records import AcceptanceRecord, decode_record
from driftguard.settings import ProxySettings
from driftguard_http import ConnectionLimits
from tests.conftest import PATIENCE_SECONDS
from tests.proxy.engines import Answer

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]


@dataclass
class Seen:
    """One request as the engine received it."""

    method: str
    target: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Sidecar:
    """Takes records; `status` is what it answers."""

    url: str = ""
    status: int = 200
    most_lines: int = 1_000
    records: list[AcceptanceRecord] = field(default_factory=list)
    posts: int = 0
    keys: list[str | None] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        self.posts += 1
        self.keys.append(request.headers.get("Authorization"))
        lines = (await request.read()).splitlines()
        status = 413 if len(lines) > self.most_lines else self.status
        if status == 200:
            self.records.extend(decode_record(line) for line in lines)
        self.arrived.set()
        told = {"accepted": len(lines), "duplicates": 0} if status == 200 else {"detail": "as it was told"}
        return web.json_response(told, status=status)

    async def wait_for(self, count: int) -> list[AcceptanceRecord]:
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(self.records) < count:
                await self.arrived.wait()
                self.arrived.clear()
        return self.records


@dataclass
class Setup:
    proxy: str
    admin: str
    engine: str
    sidecar: Sidecar
    seen: list[Seen]
    client: aiohttp.ClientSession
    stop: Callable[[], Coroutine[Any, Any, None]]  # the proxy


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[str]:
    """The address of a server with this handler."""

    def unlimited(*made_of: Any) -> web.BaseRequest:
        request: Any = web.BaseRequest
        return cast("web.BaseRequest", request(*made_of, asyncio.get_running_loop(), client_max_size=0))

    server = web.Server(handler, request_factory=unlimited, access_log=None, handler_cancellation=True)
    runner = web.ServerRunner(server, shutdown_timeout=0.1)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def not_found(_: web.BaseRequest) -> web.StreamResponse:
    return web.json_response({"detail": "Not Found"}, status=404)


@asynccontextmanager
async def proxied(
    handler: Handler,
    owned_by: str = "",
    models_seconds: float = 0.0,
    linger_seconds: float = 0.01,
    limits: ConnectionLimits | None = None,
    model_info: Handler = not_found,
    **settings: Any,
) -> AsyncIterator[Setup]:
    """Records wait for `linger_seconds` for more before they are sent. `model_info`: of an SGLang.
    models_seconds: how long the engine takes to list its models."""
    seen: list[Seen] = []
    sidecar = Sidecar()

    async def engine(request: web.BaseRequest) -> web.StreamResponse:
        if request.path == "/v1/models":
            await asyncio.sleep(models_seconds)
            return web.json_response({"data": [{"id": "m", "owned_by": owned_by}]})
        if request.path == "/model_info":
            return await model_info(request)
        body = await request.read()
        seen.append(Seen(request.method, request.raw_path, dict(request.headers), body))
        return await handler(request)

    async with AsyncExitStack() as stack:
        upstream = await stack.enter_async_context(served(engine))
        sidecar.url = await stack.enter_async_context(served(sidecar.handle))
        values = {
            "upstream": upstream,
            "engine": "other",
            "sidecar": sidecar.url,
            **settings,
        }
        running = await stack.enter_async_context(AsyncExitStack())
        (listeners,) = listeners_of("127.0.0.1", 0, 0)
        worker = Worker(0, listeners, SharedCounts(), lambda: None)
        await running.enter_async_context(
            app.running(ProxySettings(**values), "key", worker, linger_seconds=linger_seconds, limits=limits)
        )
        proxy = f"http://127.0.0.1:{listeners.port}"
        client = await stack.enter_async_context(aiohttp.ClientSession(auto_decompress=False))
        yield Setup(proxy, listeners.admin_url or "", upstream, sidecar, seen, client, running.aclose)


def answering(
    answer: Callable[[dict[str, Any]], Answer], piece_sizes: Callable[[], int] | None = None
) -> Handler:
    """An engine. piece_sizes: bytes of each piece in which a stream is written; else an event at a time."""

    async def handle(request: web.BaseRequest) -> web.StreamResponse:
        body = await request.read()
        if request.headers.get("Content-Encoding") == "gzip" and body[:2] == b"\x1f\x8b":
            body = gzip.decompress(body)
        found = answer(json.loads(body))
        if isinstance(found, bytes):
            return web.Response(body=found, content_type="application/json")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for piece in found if piece_sizes is None else _pieces(b"".join(found), piece_sizes):
            await response.write(piece)
            await asyncio.sleep(0)
        await response.write_eof()
        return response

    return handle


def _pieces(text: bytes, sizes: Callable[[], int]) -> list[bytes]:
    pieces = []
    while text:
        size = sizes()
        pieces.append(text[:size])
        text = text[size:]
    return pieces
