"""`driftguard proxy`: wiring, start and stop."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from http import HTTPStatus
from math import ceil
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import uvloop
from aiohttp import web

from driftguard.client import AsyncClient, protocol
from driftguard.errors import BadSettings
from driftguard.masking import Secrets, secrets_of_url
from driftguard.proxy.connections import LONGEST_HEADER, BoundedServer, limits_of
from driftguard.proxy.counts import SharedCounts
from driftguard.proxy.forwarding import Forwarder, noting_reuse
from driftguard.proxy.listening import BACKLOG, listeners_of
from driftguard.proxy.metrics import CONTENT_TYPE, ProxyMetrics
from driftguard.proxy.upstream import Upstream
from driftguard.proxy.workers import Worker, supervise
from driftguard.settings import ProxySettings
from driftguard_http import ConnectionLimits, Origins
from driftguard_http.allocation import collect_garbage_rarely
from driftguard_http.open_files import raise_limit
from driftguard_http.origins import is_loopback, url_of

LINGER_SECONDS: Final = 1.0
FLUSH_SECONDS: Final = 5.0
DETECT_SECONDS: Final = 2.0  # at most, before requests are accepted: streams would pass unrecorded
UPSTREAM_KEEPALIVE_SECONDS: Final = 4.0  # below uvicorn's 5, or a request could meet a closing connection


def run_proxy(settings: ProxySettings, api_key: str | None) -> None:
    """Serves until SIGTERM or Ctrl-C. `api_key`: the sidecar's. Raises BadSettings."""
    check(settings)
    try:
        protocol.headers(api_key)
    except ValueError as error:
        raise BadSettings(f"DRIFTGUARD_API_KEY: {error}") from None
    try:
        protocol.authorities_for(protocol.address_of(settings.sidecar))
    except ValueError as error:
        raise BadSettings(str(error)) from None
    raise_limit()
    collect_garbage_rarely()
    all_listeners = listeners_of(
        settings.host, settings.port, settings.admin_port, settings.workers, admin_host=settings.admin_host
    )
    ready = f"proxy ready on {url_of(settings.host, all_listeners[0].port)} for {settings.upstream}"

    def announce() -> None:
        with suppress(OSError):  # as on a full disk: it serves all the same
            print(f"{ready}\n", end="", flush=True)  # at once, since workers log

    if settings.workers == 1:
        uvloop.run(_serve(settings, api_key, Worker(0, all_listeners[0], SharedCounts(), announce)))
    else:
        supervise(all_listeners, lambda worker: uvloop.run(_serve(settings, api_key, worker)), announce)


def check(settings: ProxySettings) -> None:
    """Raises BadSettings."""
    if settings.upstream is None:
        raise BadSettings("proxy.upstream: needed; give --upstream http://HOST:PORT")
    for name, url in (("upstream", settings.upstream), ("sidecar", settings.sidecar)):
        parts = urlsplit(url)
        if "@" in parts.netloc:
            raise BadSettings(f"proxy.{name}: holds a user or password, which error messages would show")
        if parts.query or parts.fragment:
            shown = Secrets(secrets_of_url(url)).masked(url)
            raise BadSettings(f"proxy.{name}: {shown} holds a query or a fragment; paths follow it")
    if _is_own(settings.upstream, settings):
        told = f"{settings.upstream} is the address of this proxy itself; name the server's"
        raise BadSettings(f"proxy.upstream: {told}")


def _is_own(url: str, settings: ProxySettings) -> bool:
    """Whether this address leads back to the proxy, as far as names tell that."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    if port != settings.port:
        return False
    named = host == settings.host or (host == "localhost" and is_loopback(settings.host))
    return named or (is_loopback(host) and settings.host in ("localhost", "0.0.0.0"))


async def _serve(settings: ProxySettings, api_key: str | None, worker: Worker) -> None:
    loop, stopped = asyncio.get_running_loop(), asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopped.set)
    if worker.supervisor is not None:
        loop.add_reader(worker.supervisor, stopped.set)
    async with running(settings, api_key, worker):
        worker.announce()
        await stopped.wait()
        if worker.supervisor is not None:
            loop.remove_reader(worker.supervisor)


@asynccontextmanager
async def running(
    settings: ProxySettings,
    api_key: str | None,
    worker: Worker,
    *,
    linger_seconds: float = LINGER_SECONDS,
    limits: ConnectionLimits | None = None,
) -> AsyncIterator[None]:
    """At the end requests in flight finish first, then the queue is sent."""
    metrics = ProxyMetrics(worker.shared, worker.number)
    sidecar = AsyncClient(
        settings.sidecar,
        api_key=api_key,
        max_buffered=ceil(settings.max_queued_records / len(worker.shared.rows)),
        linger_seconds=linger_seconds,
    )
    upstream = Upstream(settings)
    async with AsyncExitStack() as stack:
        to_upstream = await stack.enter_async_context(_upstream_session(settings))
        stack.callback(metrics.update)  # counts the outcome of the last records
        stack.push_async_callback(sidecar.close, FLUSH_SECONDS)
        await stack.enter_async_context(_background(upstream.follow(to_upstream)))
        with suppress(TimeoutError):
            async with asyncio.timeout(DETECT_SECONDS):
                await upstream.was_asked.wait()
        forwarder = Forwarder(
            settings, upstream, to_upstream, sidecar.send, sidecar.count_unrecorded, metrics
        )
        stack.callback(forwarder.settle)
        metrics.watch(lambda: sidecar.counts)
        await stack.enter_async_context(_background(metrics.keep_updated()))
        server = BoundedServer(
            forwarder.handle, limits or limits_of(settings.max_connections), metrics.made_room
        )
        # The server waits for so long three times.
        runner = web.ServerRunner(server, shutdown_timeout=settings.shutdown_grace_seconds / 3)
        await _accept(stack, runner, worker.listeners.traffic)
        admin = web.AppRunner(_admin(settings.admin_host, metrics, forwarder.settle), access_log=None)
        await _accept(stack, admin, worker.listeners.admin)
        yield


def _upstream_session(settings: ProxySettings) -> aiohttp.ClientSession:
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=UPSTREAM_KEEPALIVE_SECONDS),
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        trace_configs=[noting_reuse()],
        timeout=aiohttp.ClientTimeout(
            total=None,
            sock_connect=settings.connect_timeout_seconds,
            sock_read=settings.read_timeout_seconds,
        ),
        max_line_size=LONGEST_HEADER,
        max_field_size=LONGEST_HEADER,
    )


@asynccontextmanager
async def _background(work: Coroutine[object, object, None]) -> AsyncIterator[None]:
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _accept(stack: AsyncExitStack, runner: web.BaseRunner, listeners: list[socket.socket]) -> None:
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    for listener in listeners:
        await web.SockSite(runner, listener, backlog=BACKLOG).start()


def _admin(bound: str, metrics: ProxyMetrics, settle: Callable[[], None]) -> web.Application:
    origins = Origins(bound, hint="ask 127.0.0.1 or localhost")

    async def healthz(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    async def exposition(_: web.Request) -> web.Response:
        settle()
        return web.Response(body=metrics.exposition(), headers={"Content-Type": CONTENT_TYPE})

    @web.middleware
    async def own_names_only(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Refuses foreign host names. No check of writes is needed: only GET is supported."""
        host = request.headers.get("Host", "").encode("utf-8", "replace")
        if problem := origins.host_problem(host):
            return web.Response(status=HTTPStatus.FORBIDDEN, text=problem)
        return await handler(request)

    app = web.Application(middlewares=[own_names_only])
    app.router.add_get("/driftguard/healthz", healthz)
    app.router.add_get("/driftguard/metrics", exposition)
    return app
