"""Refuses bodies that cannot be read, with the reason, and one of very many values or digits before it is
parsed, which is done on the event loop: seconds for 16 MB of empty lists, in which no stream would go on."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from typing import Any, Final

import numpy as np
from fastapi import Request, Response
from fastapi.routing import APIRoute

from driftguard_http import Refusal
from driftguard_http.json_text import outside_strings

# Signs outside of texts, the most of them, and what each stands for.
BOUNDS: Final = (
    (b"[{", 20_000, "arrays and objects"),
    (b":", 100_000, "members of objects"),
    (b",", 1_048_576, "values"),  # the token ids of the longest contexts; 0.2 seconds
)
# values of an array, none of them an array or object; as many as the context has tokens if that is more
MOST_IN_AN_ARRAY: Final = 20_000
MOST_DIGITS: Final = 400  # of a number, whose reading takes the square of them; the largest float has 309

_AS_ZEROS: Final = bytes.maketrans(b"123456789", b"000000000")
_NO_SIGNS: Final = bytes(set(range(256)) - set(b"[]{}:,"))
_LONG_NUMBER: Final = b"0" * (MOST_DIGITS + 1)


class BoundedRoute(APIRoute):
    """A route whose body is JSON within BOUNDS, not compressed; else Refusal (400, 415)."""

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
        # The first count is quick, and enough unless a text is full of these signs.
        if _exceeded(body) and (exceeded := _exceeded(_without_texts(body))):
            raise Refusal(400, f"the body has more than {exceeded}; send less at once")
        _check_arrays(body, self.app.state.service.limit.tokens)
        if _has_long_number(body) and _has_long_number(_without_texts(body)):
            raise Refusal(400, f"the body has a number of more than {MOST_DIGITS} digits")
        try:
            return await super().json()
        except json.JSONDecodeError:
            raise  # FastAPI tells where
        except (ValueError, RecursionError) as error:
            raise Refusal(400, f"the body is not valid JSON: {error}") from None


def _exceeded(body: bytes) -> str | None:
    """The first of BOUNDS that the body exceeds, if all of it is outside of texts."""
    for signs, most, what in BOUNDS:
        if sum(map(body.count, signs)) > most:
            return f"{most} {what}"
    return None


def _check_arrays(body: bytes, context: int) -> None:
    """Raises Refusal for an array of more numbers, texts or the like than any prompt has."""
    most = max(MOST_IN_AN_ARRAY, context)
    if body.count(b",") < most:
        return
    signs = np.frombuffer(_without_texts(body).translate(None, _NO_SIGNS), np.uint8)
    # Between the values of an array are commas alone, of an object colons too.
    others = np.flatnonzero(np.concatenate(([0], signs, [0])) != ord(","))
    longest = int(np.diff(others).max())
    if longest > most:
        raise Refusal(
            400, f"the body has an array of {longest} values, but the context is {context} tokens; send less"
        )


def _has_long_number(body: bytes) -> bool:
    return _LONG_NUMBER in body.translate(_AS_ZEROS)


def _without_texts(body: bytes) -> bytes:
    return np.frombuffer(body, np.uint8)[outside_strings(body)].tobytes()
