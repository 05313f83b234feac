"""Fake engines over real HTTP."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

Answer = tuple[int, str]


@dataclass(slots=True)
class Served:
    """`pages`: path -> what it answers now. `headers`: of every answer."""

    url: str
    pages: dict[str, Callable[[], Answer]]
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # path, Authorization
    headers: dict[str, str] = field(default_factory=dict)


@contextmanager
def served(pages: dict[str, Callable[[], Answer]] | None = None) -> Iterator[Served]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            server.asked.append((self.path, self.headers["authorization"]))
            status, text = server.pages.get(self.path, lambda: (404, "nothing here"))()
            body = text.encode()
            with suppress(BrokenPipeError):  # who asked has given up
                self.send_response(status)
                self.send_header("content-length", str(len(body)))
                for name, value in server.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server = Served(f"http://127.0.0.1:{http.server_port}", pages or {})
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server
        finally:
            http.shutdown()
            thread.join()


def ok(text: Callable[[], str]) -> Callable[[], Answer]:
    return lambda: (200, text())
