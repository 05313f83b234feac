"""Limits for connections that send nothing, send too slowly, or read nothing, on top of servers without such
limits.

Sources: uvicorn's H11Protocol and aiohttp's RequestHandler, which only limit the
time between two requests, and never close a connection in favour of another.
"""

from __future__ import annotations

import asyncio
import fcntl
import heapq
import resource
import struct
import sys
import termios
from abc import abstractmethod
from collections.abc import MutableSet
from dataclasses import dataclass
from typing import Any, Final

import structlog
from uvicorn.protocols.http.h11_impl import H11Protocol

_SHARE_CLOSED: Final = 1 / 64  # of the connections allowed, at once: the search for them looks at all
_LOOKS_SECONDS: Final = 1.0  # between two looks at an answer that waits for its reader
_HTTP_2: Final = b"PRI * HTTP/2.0\r\n"  # begins each of its connections (RFC 9113 section 3.4)
_NO_HTTP_2: Final = (
    "this server speaks HTTP/1.1 and no gRPC; exporters of OpenTelemetry need "
    "OTEL_EXPORTER_OTLP_PROTOCOL=http/protobuf or http/json"
)
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`most`: connections open at once; never more than `share_of_descriptors` of the file descriptors that
    the process may open: the rest is for the database, files, and outgoing connections. `header_seconds`:
    from a connection's opening, or the first byte of its next request, to the end of the headers.
    `unread_seconds`: how long an answer of which the client reads nothing is kept before the connection is
    closed. `keepalive_seconds`: how long a connection without a request stays open: longer than exporters
    pause, so that none sends on one that is just being closed."""

    most: int = 512
    header_seconds: float = 10.0
    unread_seconds: float = 30.0
    share_of_descriptors: float = 0.5
    keepalive_seconds: int = 75

    @property
    def allowed(self) -> int:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors == resource.RLIM_INFINITY:
            return self.most
        return max(1, min(self.most, int(descriptors * self.share_of_descriptors)))


class Bounded(asyncio.Protocol):
    """One connection; a mixin in front of the protocol class of a library. While it keeps the server waiting,
    it may be closed in favour of a newer one, so that a client with many connections does not lock others
    out."""

    limits: ConnectionLimits
    transport: Any  # asyncio.Transport, or None where a library has closed it
    _loop: asyncio.AbstractEventLoop
    _header_timer: asyncio.TimerHandle | None = None
    _reader_timer: asyncio.TimerHandle | None = None
    _unread_bytes = 0
    _read_at = 0.0  # by the loop's clock: when the client last read from a waiting answer

    @property
    @abstractmethod
    def peers(self) -> MutableSet[Any]:
        """The connections of this server, including this one."""

    @property
    @abstractmethod
    def idle(self) -> bool:
        """Whether it has no request that is being answered."""

    @property
    @abstractmethod
    def awaits_body(self) -> bool:
        """Whether the body of the request that is being answered has not arrived completely."""

    @property
    @abstractmethod
    def waits_since(self) -> float:
        """When it was opened, or its last request was answered; by any clock."""

    def made_room(self) -> None:
        """A connection was closed to make room."""

    @property
    def rank(self) -> int | None:
        """The lower, the sooner it is closed to make room; None: never, because the server is working on its
        request."""
        if self.idle:
            return 0
        if self.awaits_body:
            return 1
        waits = self._reader_timer is not None
        return 2 if waits and self._loop.time() - self._read_at >= _LOOKS_SECONDS else None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._loop = asyncio.get_running_loop()
        super().connection_made(transport)
        self._make_room()
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.idle:
            self._cancel_header_timer()
        elif self._header_timer is None and self.transport is not None and not self.transport.is_closing():
            self._await_headers()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_header_timer()
        self._cancel_reader_timer()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cancel_reader_timer()
        self._read_at, self._unread_bytes = self._loop.time(), _unread_bytes(self.transport)
        self._look_later()

    def resume_writing(self) -> None:
        self._cancel_reader_timer()
        super().resume_writing()

    def _look_at_reader(self) -> None:
        if self.transport is None:
            return
        unread_bytes = _unread_bytes(self.transport)
        if unread_bytes < self._unread_bytes:
            self._read_at = self._loop.time()
        self._unread_bytes = unread_bytes
        if self._loop.time() - self._read_at >= self.limits.unread_seconds:
            self.transport.abort()
        else:
            self._look_later()

    def _look_later(self) -> None:
        after = min(_LOOKS_SECONDS, self.limits.unread_seconds / 4)
        self._reader_timer = self._loop.call_later(after, self._look_at_reader)

    def _await_headers(self) -> None:
        self._header_timer = self._loop.call_later(self.limits.header_seconds, self._give_up)

    def _give_up(self) -> None:
        if self.transport is not None:
            self.transport.abort()

    def _cancel_header_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None

    def _cancel_reader_timer(self) -> None:
        if self._reader_timer is not None:
            self._reader_timer.cancel()
            self._reader_timer = None

    def _make_room(self) -> None:
        """Closes connections that have waited longest: first those without a request, then those whose body
        is awaited, then those whose answer is not read. Closes this one if the server works on all others."""
        if len(self.peers) <= self.limits.allowed:
            return
        others = [other for other in self.peers if isinstance(other, Bounded) and other is not self]
        waiting = [((rank, other.waits_since), other) for other in others if (rank := other.rank) is not None]
        count = max(1, int(self.limits.allowed * _SHARE_CLOSED))
        longest = [other for _, other in heapq.nsmallest(count, waiting, key=lambda each: each[0])]
        for victim in longest or [self]:
            self.peers.discard(victim)  # at once: the loop reports its end only later
            victim._give_up()
            self.made_room()


def _unread_bytes(transport: Any) -> int:
    """Of the answer, not yet at the client. The kernel's part counts too: it takes more from the transport
    only after a third of its megabytes, which a slow reader needs a minute for."""
    unread_bytes: int = transport.get_write_buffer_size()
    if sys.platform == "linux":
        (in_kernel,) = struct.unpack(
            "i", fcntl.ioctl(transport.get_extra_info("socket"), termios.TIOCOUTQ, bytes(4))
        )
        unread_bytes += in_kernel
    return unread_bytes


def bounded_protocol(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """For `http` of uvicorn.Config."""

    class BoundedProtocol(_BoundedH11):
        pass

    BoundedProtocol.limits = limits
    return BoundedProtocol


class _BoundedH11(Bounded, H11Protocol):
    _answered_at: float
    _is_http_2_told = False  # by the server's class

    @property
    def peers(self) -> MutableSet[Any]:
        return self.connections

    @property
    def idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    @property
    def awaits_body(self) -> bool:
        return self.cycle.more_body

    @property
    def waits_since(self) -> float:
        return self._answered_at

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._answered_at = self.loop.time()
        self.timeout_keep_alive = self.limits.keepalive_seconds
        super().connection_made(transport)

    def data_received(self, data: bytes) -> None:
        if self.cycle is None and data.startswith(_HTTP_2):
            if not self._is_http_2_told:
                type(self)._is_http_2_told = True  # gRPC tries again every few seconds
                _log.warning("http_2_refused", hint=_NO_HTTP_2)
            self.send_400_response(_NO_HTTP_2)
            return
        super().data_received(data)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._answered_at = self.loop.time()

    def _unsupported_upgrade_warning(self) -> None:
        """Nothing: some clients (Java's) offer HTTP/2 with each request, and are answered without it."""
