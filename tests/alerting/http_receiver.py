"""A real HTTP receiver that answers as a test sets it, and keeps what it received."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass(slots=True)
class Received:
    """One request: its headers and its decoded body."""

    path: str
    headers: dict[str, str]
    body: Any
    answered: int
    at: datetime = field(default_factory=lambda: datetime.now(UTC))


@dataclass(slots=True)
class Receiver:
    """`status`: the status of its answers from now on. They have no body; with `garbled` they have one that
    does not match its header. `ahead_seconds`: of its clock, by its Date header."""

    url: str
    status: int = 200
    garbled: bool = False
    ahead_seconds: float = 0.0
    received: list[Received] = field(default_factory=list)

    def taken(self) -> list[Received]:
        """The requests that were answered with 2xx."""
        return [item for item in self.received if item.answered < 300]


@contextmanager
def http_receiver(port: int = 0) -> Iterator[Receiver]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            receiver.received.append(Received(self.path, dict(self.headers), body, receiver.status))
            self.send_response(receiver.status)
            taken = b"ok" if receiver.status == 200 else b""  # as of Slack; Alertmanager 0.28 looks for it
            answer = b"oops" if receiver.garbled else taken
            if receiver.garbled:
                self.send_header("content-encoding", "gzip")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string((timestamp or time.time()) + receiver.ahead_seconds)

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    receiver = Receiver(f"http://127.0.0.1:{server.server_port}/hook")
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield receiver
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def wait_until(condition: Callable[[], bool], what: str, timeout_seconds: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_seconds} s in vain: {what}"
        time.sleep(0.02)
