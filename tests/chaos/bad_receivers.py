"""Receivers of pages that accept the connection and then misbehave."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from tests.chaos.row import Row
from tests.chaos.scene import SERVERS, closing, scene

_DRIP_SECONDS: Final = 1.0
_OK: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


def _hang(connection: socket.socket, stopping: threading.Event) -> None:
    del connection
    stopping.wait()


def _drip_headers(connection: socket.socket, stopping: threading.Event) -> None:
    _drip(connection, stopping, _OK + b"X-Padding: " + b"a" * 10_000)


def _drip_body(connection: socket.socket, stopping: threading.Event) -> None:
    connection.sendall(_OK + b"Content-Length: 10000\r\n\r\n")
    _drip(connection, stopping, b"a" * 10_000)


def _drip(connection: socket.socket, stopping: threading.Event, data: bytes) -> None:
    for place in range(len(data)):
        connection.sendall(data[place : place + 1])
        if stopping.wait(_DRIP_SECONDS):
            return


def _flood(connection: socket.socket, stopping: threading.Event) -> None:
    connection.sendall(_OK + b"\r\n")
    while not stopping.is_set():
        connection.sendall(b"a" * 1_000_000)


def _redirect(connection: socket.socket, stopping: threading.Event) -> None:
    del stopping
    connection.sendall(b"HTTP/1.1 307 Moved\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: 0\r\n\r\n")


def _refuse(connection: socket.socket, stopping: threading.Event) -> None:
    del stopping
    connection.sendall(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")


BEHAVIOURS: Final[dict[str, Callable[[socket.socket, threading.Event], None]]] = {
    "hang": _hang,
    "drip-headers": _drip_headers,
    "drip-body": _drip_body,
    "flood": _flood,
    "redirect": _redirect,
    "refuse": _refuse,
}


@contextmanager
def behaving(behave: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """The URL of a receiver that reads a little of each request and then calls `behave`."""
    stopping = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    listener.settimeout(0.1)

    def serve(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            connection.recv(65_536)
            behave(connection, stopping)

    def accept() -> None:
        while not stopping.is_set():
            with suppress(TimeoutError):
                connection, _ = listener.accept()
                connection.settimeout(None)
                threading.Thread(target=serve, args=(connection,), daemon=True).start()

    accepting = threading.Thread(target=accept, daemon=True)
    accepting.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        stopping.set()
        accepting.join()
        listener.close()


def receivers_misbehave(seed: int, rounds: int) -> Row:
    """One of each kind, as webhooks and as Alertmanagers, before the receiver that works in every list."""
    row = Row("receivers misbehave", f"{rounds} of each: {', '.join(BEHAVIOURS)}")
    with ExitStack() as stack:
        bad = [stack.enter_context(behaving(each)) for each in BEHAVIOURS.values() for _ in range(rounds)]
        groups = {"alerting": {"webhook_urls": bad, "alertmanager_urls": bad}}
        here = stack.enter_context(scene(seed, groups=groups))
        here.send()
        return closing(here, row, SERVERS, 120.0)
