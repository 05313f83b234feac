"""Ports of this machine, for tests of servers that are not there yet."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def unserved_port() -> Iterator[int]:
    """A port that refuses connections until a server of this test listens; no other process can take it."""
    with socket.socket() as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]
