"""SGLang's routes for an update of the draft's weights over real HTTP, with failures at each of them.

Routes, bodies, statuses and the order of checks are those of SGLang 0.5.23: sglang/srt/entrypoints/
http_server.py, managers/tokenizer_control_mixin.py, managers/scheduler_components/weight_updater.py,
model_executor/model_runner_components/weight_updater.py, utils/weight_checker.py, utils/auth.py. What a
scheduler raises is caught nowhere: its process ends, and the server with it (managers/scheduler.py:
run_scheduler_process). A supervisor starts this one again at once.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import pickle
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import torch
from safetensors.torch import load_file

from tests.retraining.http_stub import StubHandler, serving

Fault = Literal["refuse", "drop", "lose", "hang", "die", "gateway"]
_ALLOWED = {("collections", "OrderedDict"), ("torch._utils", "_rebuild_tensor_v2")}  # of what is sent here


class Refused(Exception):
    """Answered with 400 and success false."""


class SchedulerEnded(Exception):
    """An exception that nothing in the scheduler catches."""


class SafeUnpickler(pickle.Unpickler):
    """As SGLang's: it lets a storage be made of bytes by torch.load(weights_only=True)."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("torch.storage", "_load_from_bytes"):
            return lambda data: torch.load(io.BytesIO(data), weights_only=True)
        if (module, name) not in _ALLOWED:
            raise RuntimeError(f"Blocked unsafe global ({module}.{name})")
        return super().find_class(module, name)


@dataclass
class SglangStub:
    """`first`: the directory that it is started with.

    faults: at a path, from the call after so many on, for as many calls. refuse: no success, without effect.
    drop: the connection is closed without effect. lose: the same after it took effect. hang: it takes effect,
    and is answered after `release`. die: the server ends and starts again. gateway: it takes effect, and
    what is in between gives up.
    """

    first: Path
    key: str | None = None
    ranks: int = 1
    info: dict[str, Any] = field(default_factory=dict)
    has_routes: bool = True
    selects: bool = True  # before there were selectors, the checksums are the target's
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    version: str = "default"
    is_paused: bool = False
    session: str | None = None
    queued: int = 0  # requests, all the time
    has_old_prefixes: bool = True
    starts: int = 0
    changed_while_running: bool = False
    faults: dict[str, tuple[Fault, int, int]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    hung: threading.Event = field(default_factory=threading.Event)
    release: threading.Event = field(default_factory=threading.Event)
    url: str = ""

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.tensors = load_file(self.first / "model.safetensors")
        self.version, self.is_paused, self.session = "default", False, None
        self.starts += 1

    def serves(self, directory: Path) -> bool:
        wanted = load_file(directory / "model.safetensors")
        return all(torch.equal(wanted[name], self.tensors[name]) for name in wanted)

    def fault(self, path: str) -> Fault | None:
        """Of this call; counts it."""
        self.calls.append(path)
        kind, after, left = self.faults.get(path, (None, 0, 0))
        if kind is None or left == 0:
            return None
        if after:
            self.faults[path] = kind, after - 1, left
            return None
        self.faults[path] = kind, 0, left - 1
        return kind

    def answer(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Raises Refused, SchedulerEnded."""
        if path == "/server_info":
            return self._server_info()
        if path == "/model_info":
            return {"model_path": "/models/target", "weight_version": self.version}
        if path == "/weights_checker":
            return self._checksums(body)
        if path == "/flush_cache":
            if self.queued and not self.is_paused:  # managers/scheduler.py: Scheduler.flush_cache
                raise Refused("Flush cache failed.")
            self.has_old_prefixes = False
            return {}
        if path in ("/pause_generation", "/continue_generation"):
            self.is_paused = path == "/pause_generation"
            assert not self.is_paused or body["mode"] == "retract", (
                "other modes end requests, or keep stale KV"
            )
            return {"status": "ok"}
        if path == "/update_weight_version":
            assert body["abort_all_requests"] is False, "it aborts all requests unless it is told not to"
            self.version = body["new_version"]
            return {"success": True, "new_version": self.version}
        return self._of_session(path, body)

    def _server_info(self) -> dict[str, Any]:
        return {
            "speculative_algorithm": "STANDALONE",
            "speculative_draft_model_path": str(self.first),
            "speculative_draft_model_quantization": None,
            "tp_size": self.ranks,
            "dp_size": 1,
            "pp_size": 1,
            "weight_cache_mode": "off",
            "disaggregation_mode": "null",
            "api_key": self.key,
            "version": "0.5.23",
            **self.info,
        }

    def _checksums(self, body: dict[str, Any]) -> dict[str, Any]:
        assert body["action"] == "checksum", "others change weights"
        if self._server_info()["speculative_algorithm"] == "NGRAM":
            return {"success": True, "message": "Success."}
        role = body["selector"] if self.selects else "target"
        prefix = "" if role == "target" else f"{role}."
        found = {
            prefix + name: hashlib.sha256(tensor.numpy().tobytes()).hexdigest()[:16]
            for name, tensor in self.tensors.items()
        }
        ranks = [{"checksums": found, "parallelism_info": [{"role": role}]} for _ in range(self.ranks)]
        return {"success": True, "message": "Success.", "ranks": ranks, "per_engine_checksum": "0"}

    def _of_session(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        if path == "/begin_weight_update":
            if self.session is not None:
                raise Refused("a weight-update session is already open; call end_weight_update() first")
            self.session = body.get("selector", "all")
            return {"success": True, "message": "Success"}
        if self.session is None:
            raise Refused(f"{path[1:]} must run between begin_weight_update() and end_weight_update()")
        if path == "/end_weight_update":
            self.session = None
            return {"success": True, "message": "Success"}
        assert path == "/update_weights_from_tensor", path
        assert body.get("selector", "all") == self.session == "draft", "it would be loaded into the target"
        self._load(body)
        self.version = body.get("weight_version") or self.version
        return {"success": True, "message": "Success"}

    def _load(self, body: dict[str, Any]) -> None:
        self.changed_while_running |= not self.is_paused
        payloads = body["serialized_named_tensors"]
        try:
            for rank in range(self.ranks):
                named = SafeUnpickler(io.BytesIO(base64.b64decode(payloads[rank], validate=True))).load()
            for name, tensor in named:
                assert self.tensors[name].size() == tensor.size(), "Attempted to load weight into parameter"
                self.tensors[name] = tensor.clone()
        except Exception as error:
            raise SchedulerEnded(str(error)) from error


@contextmanager
def running(stub: SglangStub) -> Iterator[SglangStub]:
    lock = threading.Lock()

    class Handler(StubHandler):
        def do_GET(self) -> None:
            self._serve({})

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            self._serve(json.loads(content) if content else {})

        def _serve(self, body: dict[str, Any]) -> None:
            path = urlsplit(self.path).path
            with lock:
                fault = stub.fault(path)
            denied = stub.key is not None and self.headers.get("Authorization") != f"Bearer {stub.key}"
            if denied and path != "/ready":
                self.answer(401, {"error": "Unauthorized"})
            elif not stub.has_routes and path in ("/begin_weight_update", "/weights_checker"):
                self.answer(404, {"detail": "Not Found"})
            elif fault == "refuse":
                self._refuse(path)
            elif fault in ("drop", "die"):
                if fault == "die":
                    stub.start()
                self.close_connection = True
            elif path == "/ready":
                self._tell(fault, 503 if stub.is_paused else 200, {})
            else:
                self._carry_out(path, body, fault)

        def _carry_out(self, path: str, body: dict[str, Any], fault: Fault | None) -> None:
            try:
                found = stub.answer(path, body)
            except Refused as error:
                self._tell(fault, 400, {"success": False, "message": str(error)})
            except SchedulerEnded:
                stub.start()
                self.close_connection = True
            else:
                self._tell(fault, 200, found)

        def _tell(self, fault: Fault | None, status: int, found: dict[str, Any]) -> None:
            if fault == "hang":
                stub.hung.set()
                stub.release.wait(60)
            if fault == "lose":
                self.close_connection = True
            elif fault == "gateway":
                self.answer(504, {"error": "Gateway Timeout"})
            else:
                self.answer(status, found)

        def _refuse(self, path: str) -> None:
            if path == "/flush_cache":  # a grammar is compiled, or a hierarchical cache copies
                self.answer(400, "Flush cache failed.\n")
            elif path.endswith(("_weight_update", "_from_tensor", "_external_corpus", "_corpora")):
                self.answer(400, {"success": False, "message": "not supported while they are cached"})
            else:
                self.answer(500, {"message": "Internal Server Error"})

    with serving(Handler) as stub.url:
        try:
            yield stub
        finally:
            stub.release.set()
