"""The engine's HTTP server: wiring, start, drain, exit code."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial

import structlog
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import Scope

from driftguard_engine.engine import Engine
from driftguard_engine.server import admin
from driftguard_engine.server.admin import check_key
from driftguard_engine.server.dependencies import Service, TheService
from driftguard_engine.server.errors import CODES, error_response, install_error_handlers
from driftguard_engine.server.listener import cannot_listen
from driftguard_engine.server.metrics import Metrics
from driftguard_engine.server.openai import routes as openai_routes
from driftguard_engine.server.prompt_limit import PromptLimit
from driftguard_engine.server.runner import EngineRunner
from driftguard_engine.telemetry.telemetry import Telemetry
from driftguard_http import ConnectionLimits, Guard, Origins, Refusal, Room, Route, bounded_protocol
from driftguard_http.origins import url_of

log = structlog.get_logger("driftguard_engine.server")

MAX_BODY_BYTES = 16_000_000
LARGE_BODIES_BYTES = 256_000_000  # of all requests together
MAX_ADMIN_BODY_BYTES = 64_000
MOST_HEADER_BYTES = 32_768  # of a request, its first line included
CONNECTIONS = ConnectionLimits(most=2_048, unread_seconds=120.0)  # people may read a streamed chat slowly
FAILURE_GRACE_SECONDS = 1.0  # a failed engine still answers 503, so that a load balancer notices
CANCEL_AFTER_SECONDS = 5.0  # after the shutdown limit, for answers that no client reads


@dataclass(frozen=True, slots=True)
class ServeOptions:
    host: str = "127.0.0.1"
    port: int = 8100
    admin_key_hash: str | None = None
    shutdown_limit_seconds: float = 30.0
    allowed_hosts: tuple[str, ...] = ()


def serve(engine: Engine, telemetry: Telemetry, listener: socket.socket, options: ServeOptions) -> int:
    """Serves until SIGTERM or SIGINT, or until the engine fails. Returns the exit code: 0, or 1 on failure.

    Raises CannotListen where another process has begun to listen on the address.
    """
    server = EngineServer(engine, telemetry, options)
    # For signals before uvicorn's own handlers are there, and for those that it raises again after its clean
    # shutdown, which must not change the exit code.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, server.handle_exit)
    try:
        server.run(sockets=[listener])
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        raise cannot_listen(options.host, options.port, error) from error
    if server.runner.hangs:
        os._exit(1)  # the interpreter's own end could wait for the device
    return 1 if server.runner.failure is not None else 0


class EngineServer(uvicorn.Server):
    def __init__(self, engine: Engine, telemetry: Telemetry, options: ServeOptions) -> None:
        self._options = options
        self._engine = engine
        metrics = Metrics(engine, telemetry)
        self.runner = EngineRunner(
            engine,
            on_finished=telemetry.finished,
            on_finished_in_loop=metrics.finished,
            on_failure=self._exit_soon,
        )
        prompts = PromptLimit.of(engine.tokenizer, engine.max_length)
        service = Service(engine, self.runner, metrics, int(time.time()), options.admin_key_hash, prompts)
        limit = int(options.shutdown_limit_seconds + CANCEL_AFTER_SECONDS)
        super().__init__(
            uvicorn.Config(
                create_app(service, telemetry, options),
                http=bounded_protocol(CONNECTIONS),
                h11_max_incomplete_event_size=MOST_HEADER_BYTES,
                log_config=None,
                access_log=False,
                timeout_graceful_shutdown=limit,
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        if self.started and sockets:
            host, port = sockets[0].getsockname()[:2]
            target, draft = self._engine.target_name, self._engine.draft
            with contextlib.suppress(OSError):  # a full disk, a reader that has gone: it serves all the same
                print(
                    f"engine ready on {url_of(host, port)} target={target} draft={draft.name} "
                    f"draft_version={draft.version} method={draft.method}",
                    flush=True,
                )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        log.info("shutting down", limit_seconds=self._options.shutdown_limit_seconds)
        drain = asyncio.create_task(self.runner.drain(self._options.shutdown_limit_seconds))
        await super().shutdown(sockets)
        await drain

    def _exit_soon(self) -> None:
        asyncio.get_running_loop().call_later(FAILURE_GRACE_SECONDS, self._exit_now)

    def _exit_now(self) -> None:
        self.should_exit = True


def create_app(service: Service, telemetry: Telemetry, options: ServeOptions | None = None) -> FastAPI:
    """The ASGI application. Its lifespan starts and ends the engine thread and telemetry."""
    options = options or ServeOptions()

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        telemetry.start()
        service.runner.start()
        yield
        await service.runner.stop()
        await asyncio.to_thread(telemetry.close)

    room = Room(LARGE_BODIES_BYTES)
    app = FastAPI(title="DriftGuard engine", lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_middleware(GZipMiddleware, minimum_size=1_000, compresslevel=3)
    app.add_middleware(
        Guard,
        origins=Origins(options.host, options.allowed_hosts, hint="see --allowed-host"),
        route_of=lambda scope: _route_of(scope, service, room),
        check_key=partial(check_key, service.admin_key_hash),
        answer=partial(_refused, service.metrics),
    )
    install_error_handlers(app, service.metrics.refused)
    app.include_router(openai_routes.router)
    app.include_router(admin.router)
    app.api_route("/health", methods=["GET", "HEAD"])(health)
    app.get("/metrics", response_class=Response)(prometheus_metrics)
    return app


def _route_of(scope: Scope, service: Service, room: Room) -> Route:
    is_admin = scope["path"].startswith("/admin")
    return Route(
        needs_key=is_admin and service.admin_key_hash is not None,
        most_bytes=MAX_ADMIN_BODY_BYTES if is_admin else MAX_BODY_BYTES,
        room=room,
    )


def _refused(metrics: Metrics, scope: Scope, refusal: Refusal) -> Response:
    code = CODES.get(refusal.status_code, "invalid_request")
    metrics.refused(code)
    return error_response(Request(scope), refusal.status_code, refusal.detail, code, headers=refusal.headers)


async def health(service: TheService) -> JSONResponse:
    """200 while the engine thread lives, else 503."""
    failure = service.runner.failure
    if failure is None:
        return JSONResponse({"status": "ok"})
    return JSONResponse({"status": "failed", "detail": f"the engine thread has failed: {failure}"}, 503)


async def prometheus_metrics(service: TheService) -> Response:
    return Response(service.metrics.text(), media_type=CONTENT_TYPE_LATEST)
