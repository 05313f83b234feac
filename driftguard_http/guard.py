"""The middleware in front of routing: who sends the request, whether it is allowed, and how large it may be.

Order: Host; Origin of writes; key; declared length of the body; then, while the application reads it, its
actual length and speed. A request is refused before a byte of its body is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from driftguard_http.origins import SAFE_METHODS, Origins

BODY_SECONDS: Final = 30.0  # for the body of a request,
LEAST_BYTES_PER_SECOND: Final = 10_000  # and longer if it arrives at least as fast as this
DISCARDED_BYTES: Final = 1_000_000  # of a refused body, so that most senders can read the answer
DISCARD_SECONDS: Final = 2.0
CLOSE: Final = {"Connection": "close"}


class Refusal(HTTPException):
    """{detail}"""


@dataclass(frozen=True, slots=True)
class Route:
    """The requirements for a request before it is routed. `most_bytes`: of its body."""

    needs_key: bool
    most_bytes: int


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
        await self._app(scope, _bounded(receive, route.most_bytes), send)

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
        if route.needs_key:
            given = headers.get(b"authorization")
            await self._check_key(None if given is None else given.decode("latin-1"))
            scope.setdefault("state", {})["key_checked"] = True
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


def _bounded(receive: Receive, most_bytes: int) -> Receive:
    """Raises Refusal if the body becomes too large, or arrives too slowly."""
    loop = asyncio.get_running_loop()
    begun = loop.time()
    size_bytes = 0
    complete = False

    async def bounded() -> Message:
        nonlocal size_bytes, complete
        if complete:  # the next message only says that the client has disconnected
            return await receive()
        until = begun + BODY_SECONDS + size_bytes / LEAST_BYTES_PER_SECOND
        try:
            async with asyncio.timeout_at(until):
                message = await receive()
        except TimeoutError:
            raise Refusal(408, "the body arrived too slowly", headers=CLOSE) from None
        size_bytes += len(message.get("body", b""))
        complete = not message.get("more_body", False)
        if size_bytes > most_bytes:
            raise too_large(most_bytes)
        return message

    return bounded
