"""Refuses bodies that cannot be read, with the reason, and one of very many values before it is parsed, which
is done on the event loop: seconds for 16 MB of empty lists, in which no stream would go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, Final

import numpy as np
from fastapi import Request, Response
from fastapi.routing import APIRoute

from driftguard_http import Refusal
from driftguard_http.json_text import outside_strings

MOST_CONTAINERS: Final = 20_000  # arrays and objects; token ids and text are not counted


class BoundedRoute(APIRoute):
    """A route whose body is JSON of at most MOST_CONTAINERS arrays and objects, not compressed; else Refusal
    (400, 415)."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def bounded(request: Request) -> Response:
            return await handle(_Bounded(request.scope, request.receive))

        return bounded


class _Bounded(Request):
    async def json(self) -> Any:
        encoding = self.headers.get("content-encoding", "identity")
        if encoding.lower() != "identity":
            raise Refusal(415, f"Content-Encoding {encoding!r} is not supported; send the body as it is")
        body = await self.body()
        # The first count is quick, and enough unless a text is full of brackets.
        if body.count(b"[") + body.count(b"{") > MOST_CONTAINERS and _containers(body) > MOST_CONTAINERS:
            raise Refusal(
                400, f"the body has more than {MOST_CONTAINERS} arrays and objects; send less at once"
            )
        try:
            return await super().json()
        except json.JSONDecodeError:
            raise  # FastAPI tells where
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the body is not valid JSON: {error}") from None


def _containers(body: bytes) -> int:
    characters = np.frombuffer(body, np.uint8)
    opening = (characters == ord("[")) | (characters == ord("{"))
    return int(np.count_nonzero(opening & outside_strings(body)))
