"""The middleware in front of routing: who sends the request, whether it is allowed, and how large it may be.

Order: Host; Origin of writes; key; declared length of the body; then, while the application reads it, its
actual length and speed. A request is refused before a byte of its body is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Final

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from driftguard_http.origins import SAFE_METHODS, Origins
from driftguard_http.room import Room

BODY_SECONDS: Final = 30.0  # for the body of a request,
LEAST_BYTES_PER_SECOND: Final = 10_000  # and longer if it arrives at least as fast as this
UNSHARED_BYTES: Final = 64_000  # of a body, read even if there is no room
RETRY_AFTER_SECONDS: Final = 2
DISCARDED_BYTES: Final = 1_000_000  # of a refused body, so that most senders can read the answer
DISCARD_SECONDS: Final = 2.0
CLOSE: Final = {"Connection": "close"}


class Refusal(HTTPException):
    """{detail}"""


@dataclass(frozen=True, slots=True)
class Route:
    """The requirements for a request before it is routed. `most_bytes`: of its body. `room`: for what exceeds
    UNSHARED_BYTES of it, held until the request is answered; such a body gets BODY_SECONDS only. None: the
    application bounds that. `takes_key`:
    shows more to the holder of a key, and to everybody else what it shows without one."""

    needs_key: bool
    most_bytes: int
    room: Room | None = None
    takes_key: bool = False


# Raises Refusal if the value of the Authorization header (None: no header) is not a valid key.
KeyCheck = Callable[[str | None], Awaitable[None]]


class Guard:
    """Pure ASGI, outermost.

    `route_of` gives the requirements for a request; `answer` makes the answer to a refused one. The key is
    not checked twice: after the check, `scope["state"]["key_checked"]` is True.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        origins: Origins,
        route_of: Callable[[Scope], Route],
        check_key: KeyCheck,
        answer: Callable[[Scope, Refusal], Response],
    ) -> None:
        self._app = app
        self._origins = origins
        self._route_of = route_of
        self._check_key = check_key
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            route = await self._admit(scope)
        except Refusal as refusal:
            await self._refuse(refusal, scope, receive, send)
            return
        body = _Body(scope, receive, route)
        try:
            await self._app(scope, body.receive, send)
        finally:
            body.give_back()

    async def _admit(self, scope: Scope) -> Route:
        """Raises Refusal: 403 for a foreign Host or Origin, 401, 413."""
        headers: dict[bytes, bytes] = dict(scope["headers"])
        host = headers.get(b"host")
        if problem := self._origins.host_problem(host):
            raise Refusal(403, problem)
        if scope["method"] not in SAFE_METHODS:
            site, origin = headers.get(b"sec-fetch-site"), headers.get(b"origin")
            if problem := self._origins.write_problem(site, origin, host):
                raise Refusal(403, problem)
        route = self._route_of(scope)
        if route.needs_key or route.takes_key:
            given = headers.get(b"authorization")
            try:
                await self._check_key(None if given is None else given.decode("latin-1"))
                scope.setdefault("state", {})["key_checked"] = True
            except Refusal as refusal:
                if route.needs_key or refusal.status_code != HTTPStatus.UNAUTHORIZED:
                    raise
        declared = headers.get(b"content-length", b"")
        if declared.isdigit() and int(declared) > route.most_bytes:
            raise too_large(route.most_bytes)
        return route

    async def _refuse(self, refusal: Refusal, scope: Scope, receive: Receive, send: Send) -> None:
        if not await _is_discarded(scope, receive):
            refusal.headers = {**(refusal.headers or {}), **CLOSE}
        await self._answer(scope, refusal)(scope, receive, send)


def too_large(most_bytes: int) -> Refusal:
    return Refusal(413, f"the body is larger than {most_bytes} bytes; send less at once", headers=CLOSE)


async def _is_discarded(scope: Scope, receive: Receive) -> bool:
    """Reads and drops the body. Whether all of it arrived: if the connection is closed before, the answer may
    be lost."""
    headers = dict(scope["headers"])
    declared = headers.get(b"content-length", b"0")
    if b"expect" in headers or not declared.isdigit() or int(declared) > DISCARDED_BYTES:
        return False  # receiving would make the client send the body it has only announced
    size_bytes = 0
    try:
        async with asyncio.timeout(DISCARD_SECONDS):
            while size_bytes <= DISCARDED_BYTES:
                message = await receive()
                size_bytes += len(message.get("body", b""))
                if not message.get("more_body", False):
                    return True
    except TimeoutError:
        pass  # a slow sender is answered at once, and disconnected
    return False


class _Body:
    """The body of a request, as the application reads it."""

    def __init__(self, scope: Scope, receive: Receive, route: Route) -> None:
        self._scope = scope
        self._receive = receive
        self._most_bytes = route.most_bytes
        self._share = route.room.share() if route.room else None
        self._begun = asyncio.get_running_loop().time()
        self._size_bytes = 0
        self._complete = False

    async def receive(self) -> Message:
        """Raises Refusal if the body becomes too large, arrives too slowly, or has no room."""
        if self._complete:  # the next message only says that the client has disconnected
            return await self._receive()
        until = self._begun + BODY_SECONDS
        if self._share is None or not self._share.held_bytes:
            until += self._size_bytes / LEAST_BYTES_PER_SECOND
        try:
            async with asyncio.timeout_at(until):
                message = await self._receive()
        except TimeoutError:
            raise Refusal(408, "the body arrived too slowly", headers=CLOSE) from None
        self._size_bytes += len(message.get("body", b""))
        self._complete = not message.get("more_body", False)
        if self._size_bytes > self._most_bytes:
            raise too_large(self._most_bytes)
        if not self._has_room():
            self.give_back()
            if not self._complete:
                await _is_discarded(self._scope, self._receive)
            headers = {"Retry-After": str(RETRY_AFTER_SECONDS), **CLOSE}
            raise Refusal(429, "other large bodies are being processed; send it again later", headers=headers)
        return message

    def _has_room(self) -> bool:
        if self._share is None:
            return True
        more_bytes = self._size_bytes - UNSHARED_BYTES - self._share.held_bytes
        return more_bytes <= 0 or self._share.take(more_bytes)

    def give_back(self) -> None:
        if self._share is not None:
            self._share.give_back()
