"""An OpenAI-compatible server whose answers a test sets."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SPECULATION = {
    "mean_acceptance_length": 2.4,
    "draft_acceptance_rate": 0.35,
    "acceptance_histogram": [2, 1, 1, 0, 1],
    "num_spec_steps": 5,
    "num_accepted_draft_tokens": 7,
    "num_draft_tokens": 20,
    "num_spec_tokens": 4,
}


def answer(speculation: dict[str, Any] | None = SPECULATION, text: str = "hello") -> dict[str, Any]:
    return {
        "choices": [{"index": 0, "text": text, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 3, "completion_tokens": 13, "total_tokens": 16},
        "metrics": {"speculative_decoding": speculation, "mean_itl_ms": 20.0},
    }


@dataclass(slots=True)
class Stub:
    """The answer to completions, and the requests received. `body` may be a function of the request, which
    may give a status too."""

    url: str = ""
    owner: str | None = None  # how it signs its list of models
    models_status: int = 200
    status: int = 200
    body: Any = field(default_factory=answer)
    metrics: Callable[[], str] | None = None  # None: /metrics is unknown to it
    got: list[str] = field(default_factory=list)  # paths of all GET requests
    asked: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)


@contextmanager
def stub_server() -> Iterator[Stub]:
    """No built-in engine: /admin/info is unknown to it."""
    stub = Stub()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            stub.got.append(self.path)
            if self.path == "/metrics" and stub.metrics is not None:
                self._answer(200, stub.metrics().encode())
            elif self.path == "/v1/models":
                self._answer(stub.models_status, {"data": [{"id": "big/model", "owned_by": stub.owner}]})
            else:
                self._answer(404, {"detail": "Not Found"})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            stub.asked.append((self.path, body, dict(self.headers)))
            found = stub.body(body) if callable(stub.body) else stub.body
            self._answer(*found) if isinstance(found, tuple) else self._answer(stub.status, found)

        def _answer(self, status: int, body: object) -> None:
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            self.send_response(status)
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Quiet."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    stub.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield stub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
