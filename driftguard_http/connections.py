"""Connections that send nothing, too slowly, or read nothing, on top of uvicorn, which bounds none of these.

Source: uvicorn's H11Protocol, which has a time limit between two requests only, and counts connections
without closing one.
"""

from __future__ import annotations

import asyncio
import resource
from dataclasses import dataclass
from typing import Final

from uvicorn.protocols.http.h11_impl import H11Protocol

_SHARE_OF_DESCRIPTORS: Final = 0.5  # the rest is for the database, files, and connections to others


@dataclass(frozen=True, slots=True)
class ConnectionLimits:
    """`most`: connections open at once; never more than half of the descriptors that the process may open.
    `header_seconds`: from a connection's opening, or the first byte of its next request, to the end of the
    headers. `unread_seconds`: how long an answer may wait for its reader before the connection is cut."""

    most: int = 512
    header_seconds: float = 10.0
    unread_seconds: float = 30.0

    @property
    def allowed(self) -> int:
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors == resource.RLIM_INFINITY:
            return self.most
        return max(1, min(self.most, int(descriptors * _SHARE_OF_DESCRIPTORS)))


def bounded_protocol(limits: ConnectionLimits) -> type[asyncio.Protocol]:
    """For `http` of uvicorn.Config."""

    class BoundedProtocol(_Bounded):
        _limits = limits

    return BoundedProtocol


class _Bounded(H11Protocol):
    """One connection. While it keeps the server waiting it may be closed in favour of a newer one, so that
    whoever opens many shuts nobody else out."""

    _limits: ConnectionLimits
    since: float  # of the loop's clock: when it was opened, or its last request was answered
    _timer: asyncio.TimerHandle | None = None
    _unread: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> bool:
        """Whether it has no request that is being answered."""
        return self.cycle is None or self.cycle.response_complete

    @property
    def rank(self) -> int | None:
        """The lower, the sooner it makes room; None: never, for the server is at work for it."""
        if self.idle:
            return 0
        if self.cycle.more_body:
            return 1
        return 2 if self._unread is not None else None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.since = self.loop.time()
        self._make_room()
        self._await_headers()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if not self.idle:
            self._cancel_timer()
        elif self._timer is None and not self.transport.is_closing():
            self._await_headers()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self.since = self.loop.time()

    def connection_lost(self, exc: Exception | None) -> None:
        self._cancel_timer()
        self._cancel_unread()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._cancel_unread()
        self._unread = self.loop.call_later(self._limits.unread_seconds, self.transport.abort)

    def resume_writing(self) -> None:
        self._cancel_unread()
        super().resume_writing()

    def _await_headers(self) -> None:
        self._timer = self.loop.call_later(self._limits.header_seconds, self.transport.abort)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _cancel_unread(self) -> None:
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None

    def _make_room(self) -> None:
        """Of those without a request, then of those whose body is awaited, then of those whose answer is not
        read, closes the one that waits longest; this one where the server is at work for all others."""
        if len(self.connections) <= self._limits.allowed:
            return
        others = [other for other in self.connections if isinstance(other, _Bounded) and other is not self]
        waiting = [((rank, other.since), other) for other in others if (rank := other.rank) is not None]
        victim = min(waiting, key=lambda each: each[0])[1] if waiting else self
        self.connections.discard(victim)  # at once: the loop tells of its end only later
        victim.transport.abort()
