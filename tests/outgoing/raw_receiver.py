"""A receiver whose answer a test writes byte by byte, and which records what happens to the connection."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

Answering = Callable[[socket.socket, threading.Event], None]


@dataclass(slots=True)
class RawReceiver:
    """`requests`: connections that sent a request. `sent_bytes`: how much of an endless answer was sent until
    the other side closed. `closed`: set when the other side has closed a connection."""

    url: str
    requests: int = 0
    sent_bytes: int = 0
    closed: threading.Event = field(default_factory=threading.Event)


@contextmanager
def raw_receiver(answer: Answering) -> Iterator[RawReceiver]:
    """Calls `answer(connection, stopping)` in a thread for each connection, once its request is there."""
    stopping = threading.Event()
    threads: list[threading.Thread] = []
    with socket.create_server(("127.0.0.1", 0)) as listener:
        receiver = RawReceiver(f"http://127.0.0.1:{listener.getsockname()[1]}/hook")

        def serve(connection: socket.socket) -> None:
            with connection:
                _read_request(connection)
                receiver.requests += 1
                try:
                    answer(connection, stopping)
                    if not stopping.is_set():
                        connection.settimeout(60)
                        while connection.recv(65_536):
                            pass
                        receiver.closed.set()
                except OSError:
                    receiver.closed.set()

        def accept() -> None:
            while not stopping.is_set():
                try:
                    connection, _ = listener.accept()
                except OSError:
                    return
                threads.append(threading.Thread(target=serve, args=(connection,)))
                threads[-1].start()

        accepting = threading.Thread(target=accept)
        accepting.start()
        try:
            yield receiver
        finally:
            stopping.set()
            listener.shutdown(socket.SHUT_RDWR)
            accepting.join()
    for thread in threads:
        thread.join()


def _read_request(connection: socket.socket) -> None:
    received = b""
    while b"\r\n\r\n" not in received:
        received += connection.recv(65_536)
    head, _, body = received.partition(b"\r\n\r\n")
    length = next(
        int(line.split(b":")[1]) for line in head.split(b"\r\n") if line.lower().startswith(b"content-length")
    )
    while len(body) < length:
        body += connection.recv(65_536)


def dripping(start: bytes, drip: bytes = b"x", every_seconds: float = 0.05) -> Answering:
    """`start` at once, then `drip` without end."""

    def answer(connection: socket.socket, stopping: threading.Event) -> None:
        connection.sendall(start)
        while not stopping.wait(every_seconds):
            connection.sendall(drip)

    return answer


def saying(answer_bytes: bytes) -> Answering:
    def answer(connection: socket.socket, stopping: threading.Event) -> None:
        connection.sendall(answer_bytes)

    return answer


def silent(connection: socket.socket, stopping: threading.Event) -> None:
    stopping.wait(0)
