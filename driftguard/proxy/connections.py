"""An aiohttp server with bounded connections; a handler whose request body is broken off receives an
error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, MutableSet
from typing import Any, Final

from aiohttp import StreamReader, web
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


def close_behind_trailers(request: web.BaseRequest, response: web.StreamResponse) -> None:
    """The library's parser takes the last trailer of a body for a header of the connection's next request,
    which may be another client's behind a reverse proxy."""
    connection = request.protocol
    if _CODING in request.headers and not (
        isinstance(connection, _Connection) and connection.ends_with(request.content)
    ):
        response.force_close()


class BoundedServer(web.Server):
    """`on_room`: is called for each connection that is closed to make room."""

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

    def __call__(self) -> RequestHandler:
        return _Connection(self)


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
