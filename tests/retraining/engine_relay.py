"""A real engine process behind one address that outlives it, killed at a chosen moment of a promotion."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Literal

import httpx

from tests.engine.server.processes import engine_process
from tests.forked import ForkedProcess
from tests.retraining.http_stub import StubHandler, serving
from tests.retraining.world import Models

Moment = Literal["draft loaded", "activation asked", "activation unanswered", "activation answered"]


class RelayedEngine:
    """What the sidecar calls is passed on, one call after the other, to the engine that runs now.

    kill_at kills it once with SIGKILL:
    "draft loaded": the sidecar gets the answer to its load, and has not requested the activation yet;
    "activation asked": the sidecar has requested it, and the engine has not received the request;
    "activation unanswered": the engine has activated the draft, and its answer is lost;
    "activation answered": the same, but the sidecar gets the answer after the engine was killed.
    returns_at_once: the killed engine serves again before the sidecar can make its next call.
    """

    def __init__(self, models: Models, state_dir: Path) -> None:
        self.state_dir = state_dir
        self.kill_at: Moment | None = None
        self.returns_at_once = False
        self.url = ""
        self._models = models
        self._upstream = ""
        self._process: ForkedProcess | None = None
        self._processes = ExitStack()

    def start(self) -> None:
        assert self._process is None
        options = ["--draft", str(self._models.draft), "--server-name", "engine-1"]
        options += ["--state-dir", str(self.state_dir)]
        started = engine_process(self._models.target.parent, *options)
        self._process, self._upstream, _ = self._processes.enter_context(started)

    def kill(self) -> None:
        assert self._process is not None
        self._process.kill()
        self._process.wait()
        self._process = None

    def stop(self) -> None:
        self._processes.close()

    def serving(self) -> str:
        """The version that the engine says is in service."""
        return str(httpx.get(f"{self.url}/admin/info").json()["draft"]["version"])

    def pass_on(self, method: str, path: str, content: bytes) -> httpx.Response | None:
        """The engine's answer; None where the caller's connection breaks."""
        kill_at = self.kill_at if self._is_time(path) else None
        if kill_at == "activation asked":
            return self._die(None)
        if self._process is None:
            return None
        answer = httpx.request(method, self._upstream + path, content=content, headers=_JSON, timeout=60)
        if kill_at == "activation unanswered":
            return self._die(None)
        return self._die(answer) if kill_at else answer

    def _is_time(self, path: str) -> bool:
        return path.endswith("/drafts" if self.kill_at == "draft loaded" else "/activate")

    def _die(self, answer: httpx.Response | None) -> httpx.Response | None:
        self.kill_at = None
        self.kill()
        if self.returns_at_once:
            self.start()
        return answer


_JSON = {"Content-Type": "application/json"}


@contextmanager
def relaying(engine: RelayedEngine) -> Iterator[RelayedEngine]:
    """Starts the engine and the relay before it."""
    one_at_a_time = threading.Lock()

    class Handler(StubHandler):
        def do_GET(self) -> None:
            self._relay(b"")

        def do_POST(self) -> None:
            self._relay(self.rfile.read(int(self.headers.get("Content-Length") or 0)))

        def _relay(self, content: bytes) -> None:
            with one_at_a_time:
                answer = engine.pass_on(self.command, self.path, content)
            self.close_connection = True
            if answer is not None:
                self.send_response(answer.status_code)
                self.send_header("Content-Length", str(len(answer.content)))
                self.end_headers()
                self.wfile.write(answer.content)

    with serving(Handler) as engine.url:
        try:
            engine.start()
            yield engine
        finally:
            engine.stop()
