"""Server-sent events (WHATWG HTML §9.2), and noticing that the client has gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from contextlib import AbstractContextManager, suppress
from typing import Any, TypeVar

import msgspec
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

DONE = b"data: [DONE]\n\n"
HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # no proxy may hold tokens back

# JSON has escaped the control characters of ASCII among them.
_LINE_ENDS = tuple((chr(code).encode(), b"\\u%04x" % code) for code in (0x85, 0x2028, 0x2029))

T = TypeVar("T")


class ClientGone(Exception):
    """The client has closed its connection; no answer can be sent."""


def event(data: dict[str, Any]) -> bytes:
    """One event holding one JSON object: one line, also where lines are split as by str.splitlines."""
    line = msgspec.json.encode(data)
    for character, escaped in _LINE_ENDS:
        line = line.replace(character, escaped)
    return b"data: " + line + b"\n\n"


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Awaits `work`, and cancels it as soon as the client disconnects. Raises ClientGone then."""
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Sends events as they come, inside the context `owner`, which ends also when the client has gone."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], *, owner: AbstractContextManager[object]) -> None:
        super().__init__(headers=HEADERS)
        del self.headers["content-length"]
        self._events = events
        self._owner = owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        del scope
        with self._owner, suppress(ClientGone):
            await unless_disconnected(receive, self._send_all(send))

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async for chunk in self._events:
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
