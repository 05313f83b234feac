"""Binds the server's address before anything large is imported or loaded."""

from __future__ import annotations

import errno
import socket


class CannotListen(Exception):
    """{host}:{port}: cannot listen there ({why})"""


def bind(host: str, port: int) -> socket.socket:
    """Binds before models load, so that a port in use is reported at once. Raises CannotListen."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise cannot_listen(host, port, error) from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise cannot_listen(host, port, error) from error
    return listener


def cannot_listen(host: str, port: int, error: OSError) -> CannotListen:
    why = "the port is in use" if error.errno == errno.EADDRINUSE else error.strerror or str(error)
    return CannotListen(f"{host}:{port}: cannot listen there: {why}")
