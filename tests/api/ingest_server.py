"""A real HTTP server around the ingest routers, in a thread of the test."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import uvicorn
from fastapi import FastAPI


@contextmanager
def serving(app: FastAPI) -> Iterator[httpx.Client]:
    """A client whose base URL is the served app; the app's start and stop are run."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the server did not start"
                time.sleep(0.01)
            address = f"http://127.0.0.1:{listener.getsockname()[1]}"
            with httpx.Client(base_url=address, timeout=60) as client:
                yield client
        finally:
            server.should_exit = True
            thread.join()
