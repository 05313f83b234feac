"""Servers for tests: the engine's own over a thread, and a receiver that plays the sidecar."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
from driftguard_engine.engine import Engine
from driftguard_engine.server.app import EngineServer, ServeOptions
from driftguard_engine.server.listener import bind
from driftguard_engine.telemetry.telemetry import Telemetry

PATIENCE_SECONDS = 60.0  # a guard against hanging; no test waits this long when it passes


def wait_until(condition: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, f"never happened: {what}"
        time.sleep(0.01)


@contextmanager
def served(
    engine: Engine, telemetry: Telemetry | None = None, options: ServeOptions | None = None
) -> Iterator[httpx.Client]:
    """A client of the engine's real server, on a free port."""
    quiet = telemetry or Telemetry(None, None, "test", engine.target_name)
    listener = bind("127.0.0.1", 0)
    server = EngineServer(engine, quiet, options or ServeOptions(shutdown_limit_seconds=5))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started, "the server started")
        host, port = listener.getsockname()
        with httpx.Client(base_url=f"http://{host}:{port}", timeout=30) as client:
            yield client
    finally:
        server.should_exit = True
        thread.join(PATIENCE_SECONDS)


@dataclass(slots=True)
class Reply:
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b'{"accepted": 1, "duplicates": 0}'


@dataclass(slots=True)
class Batch:
    path: str
    headers: dict[str, str]
    lines: list[dict[str, Any]]
    status: int
    received_at: float  # time.monotonic()


class Receiver:
    """A sidecar's ingest over real HTTP. `answer` decides per batch; only a 200 stores its lines."""

    def __init__(
        self, port: int = 0, answer: Callable[[str, list[dict[str, Any]]], Reply] | None = None
    ) -> None:
        self.answer = answer or (lambda path, lines: Reply())
        self.batches: list[Batch] = []
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                lines = [json.loads(line) for line in body.splitlines()]
                reply = receiver.answer(self.path, lines)
                receiver.batches.append(
                    Batch(self.path, dict(self.headers), lines, reply.status, time.monotonic())
                )
                self.send_response(reply.status)
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.send_header("Content-Length", str(len(reply.body)))
                self.end_headers()
                self.wfile.write(reply.body)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def stored(self, path: str = "/api/v1/records") -> list[dict[str, Any]]:
        """The lines of every batch that was answered with 200, in order of arrival."""
        return [
            line
            for batch in self.batches
            if batch.path == path and batch.status == 200
            for line in batch.lines
        ]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def __enter__(self) -> Receiver:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
