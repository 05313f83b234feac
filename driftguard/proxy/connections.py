"""An aiohttp server with bounded connections; a handler whose request body is broken off receives an
error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableSet
from contextlib import suppress
from typing import Any, Final

from aiohttp import HttpVersion11, StreamReader, web
from aiohttp.helpers import ceil_timeout
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.streams import EMPTY_PAYLOAD
from aiohttp.web_protocol import RequestHandler
from multidict import istr

from driftguard_http import Bounded, ConnectionLimits

LONGEST_HEADER: Final = 65_536
MOST_HEADER_BYTES: Final = 131_072  # of a request, its first line included
HEADER_SECONDS: Final = 30.0
UNREAD_SECONDS: Final = 300.0
SHARE_OF_DESCRIPTORS: Final = 0.4  # each may have another one upstream, which may stay open longer
DRAIN_SECONDS: Final = 1.0  # without a request, after which a connection is closed when the server stops
_LOOKS_SECONDS: Final = 0.05  # between two looks at connections that are not closed yet
_CODING: Final = istr("Transfer-Encoding")
_WHY_TOO_LARGE: Final = b"the headers have more than %d bytes\n" % MOST_HEADER_BYTES
_LAST_CHUNK: Final = b"\r\n0\r\n\r\n"  # of a body without trailers, with the end of what is before it
_TOO_LARGE: Final = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\nConnection: close\r\nContent-Type: text/plain\r\n"
    b"Content-Length: %d\r\n\r\n%s" % (len(_WHY_TOO_LARGE), _WHY_TOO_LARGE)
)


class BadBody(Exception):
    """A request's body breaks the rules of its transfer coding."""


def limits_of(max_connections: int) -> ConnectionLimits:
    """`max_connections`: from the settings."""
    return ConnectionLimits(max_connections, HEADER_SECONDS, UNREAD_SECONDS, SHARE_OF_DESCRIPTORS)


def close_if_last(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """Where no other request may follow on the connection: the server stops, and the head of the answer can
    still say so; or the library's parser would take the last trailer of this body for a header of the next
    request, which may be another client's behind a reverse proxy; or nothing but the end of the connection
    tells a client of HTTP/1.0 where an answer of unknown length ends."""
    connection = request.protocol if isinstance(request.protocol, _Connection) else None
    stops = connection is not None and connection.server.stops and not response.prepared
    ends = connection is not None and connection.ends_with(request.content)
    has_no_end = request.version < HttpVersion11 and response.content_length is None
    if stops or has_no_end or (_CODING in request.headers and not ends):
        response.force_close()


class BoundedServer(web.Server):
    """`on_room`: is called for each connection that is closed to make room.

    When it stops, a client may just be sending on a connection that has no request: such a request is still
    answered, and its client is told to close.
    """

    def __init__(
        self,
        handler: Callable[[web.BaseRequest], Awaitable[web.StreamResponse]],
        limits: ConnectionLimits,
        on_room: Callable[[], None],
    ) -> None:
        super().__init__(handler, handler_cancellation=True)
        self.limits = limits
        self.open: set[_Connection] = set()
        self.on_room = on_room
        self.stops = False

    def __call__(self) -> RequestHandler:
        return _Connection(self)

    def pre_shutdown(self) -> None:
        """When nothing listens any more; the library would close connections without a request here."""
        self.stops = True

    async def shutdown(self, timeout: float | None = None) -> None:  # noqa: ASYNC109 (the base's)
        """Waits three times for at most `timeout`: the library waits for a request, and cancels it."""
        with suppress(TimeoutError):
            async with ceil_timeout(timeout):
                while any(connection.is_in_use for connection in self.open):  # noqa: ASYNC110 (time ends it)
                    await asyncio.sleep(_LOOKS_SECONDS)
        super().pre_shutdown()
        await super().shutdown(timeout)


class _Connection(Bounded, RequestHandler):
    def __init__(self, server: BoundedServer) -> None:
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]
            auto_decompress=False,
            keepalive_timeout=server.limits.keepalive_seconds,
            max_line_size=LONGEST_HEADER,
            max_field_size=LONGEST_HEADER,
        )
        self.server = server
        self.limits = server.limits
        self.made_room = server.on_room  # type: ignore[method-assign]
        self._open = server.open
        self._arriving: StreamReader = EMPTY_PAYLOAD  # the body of the latest request
        self._header_bytes = 0  # of a request that has not arrived completely
        self._newest_bytes = b""

    @property
    def peers(self) -> MutableSet[Any]:
        return self._open

    @property
    def idle(self) -> bool:
        if self._waiter is None:  # at work, or not yet begun
            return self._request_count == 0
        return not self._waiter.done()

    @property
    def awaits_body(self) -> bool:
        return not self._arriving.is_eof()

    @property
    def waits_since(self) -> float:
        return self._next_keepalive_close_time

    @property
    def is_in_use(self) -> bool:
        """It has a request, or an answer that the system has not taken yet, or had a request a moment ago."""
        if not self.idle or (self.transport is not None and self.transport.get_write_buffer_size()):
            return True
        return self._loop.time() < self.waits_since - self.keepalive_timeout + DRAIN_SECONDS

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._open.add(self)
        super().connection_made(transport)

    def connection_lost(self, exc: BaseException | None) -> None:
        self._open.discard(self)
        super().connection_lost(exc)  # type: ignore[arg-type]

    def data_received(self, data: bytes) -> None:
        requests, awaited_body = self._request_count, self.awaits_body
        newest = data[-len(_LAST_CHUNK) :]
        self._newest_bytes = (self._newest_bytes + newest)[-len(_LAST_CHUNK) :]
        stops = self._close, self._force_close
        if awaited_body:  # a server that stops would drop the rest, which its request waits for
            self._close = self._force_close = False
        super().data_received(data)
        self._close, self._force_close = self._close or stops[0], self._force_close or stops[1]
        if self._request_count > requests:
            if self.awaits_body:  # no new request can have arrived: this is a parser error,
                self._arriving.set_exception(BadBody())  # which the body's reader does not receive
            self._arriving = self._messages[-1][1]
            self._header_bytes = 0
        elif not awaited_body:
            self._header_bytes += len(data)
            if self._header_bytes > MOST_HEADER_BYTES:
                self._refuse_headers()

    def ends_with(self, body: StreamReader) -> bool:
        """Whether the last chunk of this body is the last that has arrived, without trailers behind it."""
        return body is self._arriving and body.is_eof() and self._newest_bytes == _LAST_CHUNK

    def log_exception(self, *args: Any, **keywords: Any) -> None:
        """Does not log errors of requests: the library would log part of the request."""
        if not isinstance(keywords.get("exc_info"), HttpProcessingError | BadBody):
            super().log_exception(*args, **keywords)

    def _refuse_headers(self) -> None:
        if self.transport is None:
            return
        if not self.idle:  # behind a request whose answer cannot be overtaken
            self.transport.abort()
            return
        self.transport.write(_TOO_LARGE)
        self.force_close()
