"""A local webhook receiver, in place of a pager."""

from __future__ import annotations

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """Collects every JSON document that is posted to it, with the time of arrival."""

    def __init__(self) -> None:
        self.pages: list[tuple[float, dict[str, Any]]] = []
        pages = self.pages

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", "0")))
                pages.append((time.time(), json.loads(body)))
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 (the base class's name)
                """Logs nothing: the demo's screen shows what arrives."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/page"
        threading.Thread(target=self._server.serve_forever, name="webhook receiver", daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
