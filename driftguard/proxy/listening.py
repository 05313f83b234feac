"""The sockets that workers accept on: one each, all with the same address."""

from __future__ import annotations

import errno
import itertools
import socket
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Final

import structlog

from driftguard.errors import BadSettings
from driftguard_http.origins import url_of

_ABSENT: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)
_log = structlog.get_logger(__name__)

BACKLOG: Final = 1_024  # connections that wait until a worker accepts them


@dataclass(frozen=True, slots=True)
class Listeners:
    """Of one worker. A host name may have several addresses."""

    traffic: list[socket.socket]
    admin: list[socket.socket]

    def close(self) -> None:
        for listener in (*self.traffic, *self.admin):
            listener.close()

    @property
    def port(self) -> int:
        return int(self.traffic[0].getsockname()[1])

    @property
    def admin_url(self) -> str | None:
        return url_of(*self.admin[0].getsockname()[:2]) if self.admin else None


def listeners_of(
    host: str, port: int, admin_port: int | None, workers: int = 1, *, admin_host: str = "127.0.0.1"
) -> list[Listeners]:
    """One for each worker, already listening; with several, the kernel distributes connections among them.

    Raises BadSettings: an address is in use or unknown, or this system does not distribute connections.
    """
    if workers > 1 and sys.platform != "linux":
        raise BadSettings("proxy.workers: only Linux distributes connections among several workers; use 1")
    traffic = _listen(host, port, workers, "port")
    admin: list[list[socket.socket]] = [[] for _ in traffic]
    if admin_port is not None:
        admin = _listen(admin_host, admin_port, workers, "admin_port")
    return [Listeners(*both) for both in zip(traffic, admin, strict=True)]


def _listen(host: str, port: int, workers: int, setting: str) -> list[list[socket.socket]]:
    """The sockets of each worker. An address that this machine does not have is left out where the host has
    others: containers without IPv6 may know ::1 as localhost."""
    made: list[list[socket.socket]] = [[] for _ in range(workers)]
    absent: OSError | None = None
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(addresses):
            at = (address[0], port, *address[2:])
            try:
                _socket(family, at, is_shared=False).close()  # fails if another program uses the port
            except OSError as error:
                if error.errno not in _ABSENT:
                    raise
                _log.warning("an address is not listened on", host=host, address=at[0], error=error.strerror)
                absent = error
                continue
            for sockets in made:
                sockets.append(_socket(family, at, is_shared=workers > 1))
                port = sockets[-1].getsockname()[1]  # for port 0: the port that was chosen
                at = (address[0], port, *address[2:])
        if absent is not None and not made[0]:
            raise absent
    except OSError as error:
        for listener in itertools.chain(*made):
            listener.close()
        raise BadSettings(
            f"proxy.{setting}: cannot listen on {host}:{port}: {error.strerror}; choose another"
        ) from None
    return made


def _socket(family: int, address: tuple[str | int, ...], *, is_shared: bool) -> socket.socket:
    """Raises OSError."""
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            with suppress(OSError):
                made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made
