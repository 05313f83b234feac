"""What the demo and the suite start their servers with."""

from __future__ import annotations

import errno
import socket

import pytest

from driftguard.demo.processes import free_port


def test_a_free_port_is_kept_from_outgoing_connections_until_its_server_listens() -> None:
    port = free_port()
    with socket.socket() as outgoing:
        with pytest.raises(OSError) as refusal:
            outgoing.bind(("127.0.0.1", port))
        assert refusal.value.errno == errno.EADDRINUSE
    for _ in ("started", "started again"):
        with socket.create_server(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)):
            pass
