"""vLLM's routes for an update of the draft's weights over real HTTP, with failures at each of them.

Paths, bodies, states and statuses are those of vllm/entrypoints/rl/online/api_router.py and of the sessions
in vllm/v1/worker/gpu_worker.py, vLLM 0.32.0 and 0.33.0; what a worker raises is answered as
vllm/entrypoints/serve/exception_handling does, and the connection is closed. tests/live has vLLM itself.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from tests.retraining.http_stub import StubHandler, serving

Fault = Literal["refuse", "garble", "drop", "lose", "hang"]


@dataclass
class VllmStub:
    """`weights`: the directory whose weights are served; `version`: as /weight_info tells.

    faults: at a path, for as many calls. refuse: 500 without effect. garble: the same,
    with JSON nested without end. drop: the connection is closed without
    effect. lose: the same after it took effect. hang: it takes effect, and is answered after `release`.
    """

    weights: str
    version: str = "default"
    has_routes: bool = True
    has_backend: bool = True
    is_paused: bool = False
    is_mixed: bool = False  # a load that is refused leaves a mix
    active: bool = False
    held: str | None = None
    digest: str | None = None  # of the last update
    faults: dict[str, tuple[Fault, int]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    hung: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def fault(self, path: str) -> Fault | None:
        """Of this call; counts it."""
        self.calls.append(path)
        kind, left = self.faults.get(path, (None, 0))
        if kind is None or left == 0:
            return None
        self.faults[path] = kind, left - 1
        return kind

    def answer(self, path: str, body: dict[str, Any], query: str) -> dict[str, Any]:
        """Raises RuntimeError as a worker does."""
        if path == "/is_paused":
            return {"is_paused": self.is_paused}
        if path == "/weight_info":
            return {"weight_version": self.version}
        if path == "/pause":
            assert query == "mode=keep"
            self.is_paused = True
            return {"status": "paused"}
        if path == "/resume":
            self.is_paused = False
            return {"status": "resumed"}
        return self._of_worker(path, body)

    def _of_worker(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if not self.has_backend:
            raise RuntimeError(
                "Weight transfer not configured. Please set weight_transfer_config to enable weight transfer."
            )
        if path == "/init_weight_transfer_engine":
            assert body["init_info"] == {"driftguard": True}
            return {"message": "Weight transfer initialized"}
        if path == "/start_draft_weight_update":
            if self.active:
                raise RuntimeError("start_weight_update called while a weight update is already active.")
            self.active, self.held = True, None
            return {"message": "Draft weight update started"}
        if not self.active:
            raise RuntimeError(f"{path[1:]} called without a matching start_weight_update.")
        if path == "/update_weights":
            self.held = body["update_info"].get("directory")
            self.digest = body["update_info"].get("checksums_sha256")
            return {"message": "Weights updated"}
        assert path == "/finish_weight_update", path
        if self.held is not None:
            assert self.is_paused, "weights change under running requests"
            self.weights, self.is_mixed = self.held, False
        self.active, self.held = False, None
        self.version = body.get("weight_version") or self.version
        return {"message": "Weight update finished"}

    def seen(self) -> Counter[str]:
        return Counter(self.calls)


@contextmanager
def running(stub: VllmStub) -> Iterator[VllmStub]:
    class Handler(StubHandler):
        def do_GET(self) -> None:
            self._serve({})

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._serve(json.loads(content) if content else {})

        def _serve(self, body: dict[str, Any]) -> None:
            parts = urlsplit(self.path)
            fault = stub.fault(parts.path)
            if not stub.has_routes:
                self.answer(404, {"detail": "Not Found"})
            elif fault == "refuse":
                if parts.path == "/update_weights":
                    stub.active = False
                elif parts.path == "/finish_weight_update" and stub.held is not None:
                    stub.held, stub.is_mixed = None, True
                self._refuse("out of memory")
            elif fault == "garble":
                self.send_content(502, b"[" * 100_000)
            elif fault == "drop":
                self.close_connection = True
            else:
                try:
                    found = stub.answer(parts.path, body, parts.query)
                except RuntimeError as error:
                    self._refuse(str(error))
                    return
                if fault == "hang":
                    stub.hung.set()
                    stub.release.wait(60)
                if fault == "lose":
                    self.close_connection = True
                else:
                    self.answer(200, found)

        def _refuse(self, reason: str) -> None:
            message = (
                f"Call to collective_rpc method failed: Worker failed with error '{reason}', "
                "please check the stack trace above for the root cause"
            )
            told = {"message": message, "type": "InternalServerError", "param": None, "code": 500}
            self.answer(500, {"error": told})
            self.close_connection = True

    with serving(Handler) as stub.url:
        try:
            yield stub
        finally:
            stub.release.set()
