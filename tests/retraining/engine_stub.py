"""The engine's admin API over real HTTP, with failures that cannot be caused in a real engine."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from driftguard_training.model_directories import model_version

from tests.retraining.http_stub import StubHandler, serving

SERVER, TARGET = "engine-1", "target"


class EngineStub:
    """The state of an engine. `hold` and `lose` name calls: "load", "activate".

    hold: the call is answered only after `release`; "activate" takes effect first, "load" does not.
    lose: the call takes effect and the connection is closed without an answer.
    refuse: the call is answered with 500 and has no effect.
    stops: it ends, and takes no draft any more: 503. mute: it closes every connection without an answer.
    """

    def __init__(self, target: Path, draft: Path) -> None:
        self.target, self.target_name = target, TARGET
        self.serving: dict[str, Any] = {
            "name": "draft",
            "version": model_version(draft),
            "method": "draft_model",
            "directory": str(draft),
        }
        self.first = self.serving
        self.loaded = {self.serving["version"]: self.serving}
        self.activated = True
        self.given_up: str | None = None
        self.started_at = time.monotonic() - 3_600
        self.calls: list[str] = []
        self.hold = self.lose = self.refuse = ""
        self.stops = self.mute = False
        self.held = threading.Event()
        self.release = threading.Event()
        self.url = ""

    def info(self) -> dict[str, Any]:
        return {
            "server": SERVER,
            "target": self.target_name,
            "target_directory": str(self.target),
            "draft": self.serving,
            "activated": self.activated,
            "given_up": self.given_up,
            "uptime_seconds": time.monotonic() - self.started_at,
            "drafts": list(self.loaded.values()),
            "speculation": True,
            "num_speculative_tokens": 4,
        }

    def load(self, body: dict[str, Any]) -> dict[str, Any]:
        draft = {"name": "draft", "method": "draft_model", **body}
        return self.loaded.setdefault(body["version"], draft)

    def activate(self, version: str) -> dict[str, Any]:
        self.serving, self.activated = self.loaded[version], True
        return self.serving

    def start_again(self) -> None:
        """As a process that keeps nothing over a restart."""
        self.serving, self.loaded, self.activated = self.first, {self.first["version"]: self.first}, False
        self.started_at = time.monotonic()
        self.stops = False

    def wait(self) -> None:
        self.held.set()
        self.release.wait(60)


@contextmanager
def running(stub: EngineStub) -> Iterator[EngineStub]:
    class Handler(StubHandler):
        def do_GET(self) -> None:
            if stub.mute:
                self.close_connection = True
                return
            self.answer(200, stub.info())

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            call = "activate" if self.path.endswith("/activate") else "load"
            stub.calls.append(call)
            if stub.refuse == call:
                self.answer(500, {"title": "Internal error", "detail": "out of memory"})
                return
            if stub.stops and call == "load":
                told = "draft: not loaded, because the engine stops"
                self.answer(503, {"status": 503, "detail": told, "code": "engine_unavailable"})
                return
            if stub.hold == call == "load":
                stub.wait()
            result = (
                stub.load(json.loads(content)) if call == "load" else stub.activate(self.path.split("/")[-2])
            )
            if stub.hold == call == "activate":
                stub.wait()
            if stub.lose == call:
                self.close_connection = True
                return
            self.answer(201 if call == "load" else 200, result)

    with serving(Handler) as stub.url:
        try:
            yield stub
        finally:
            stub.release.set()
