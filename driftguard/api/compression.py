"""Compresses answers with gzip for clients that accept it."""

from __future__ import annotations

from typing import Final

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.gzip import GZipMiddleware
from starlette.types import Receive, Scope, Send

ACCEPT: Final = "accept-encoding"


class Compression(GZipMiddleware):
    """Starlette's middleware only looks for the word gzip. Here `gzip;q=0` refuses it, and `*` accepts it."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = MutableHeaders(raw=list(scope["headers"]))
            headers[ACCEPT] = "gzip" if accepts_gzip(headers) else "identity"
            scope = {**scope, "headers": headers.raw}
        await super().__call__(scope, receive, send)


def accepts_gzip(headers: Headers) -> bool:
    """RFC 9110, 12.5.3; an invalid weight counts as 0."""
    weights: dict[str, float] = {}
    for item in ",".join(headers.getlist(ACCEPT)).lower().split(","):
        coding, _, parameter = item.partition(";")
        name, _, value = parameter.partition("=")
        try:
            weights[coding.strip()] = float(value) if name.strip() == "q" else 1.0
        except ValueError:
            weights[coding.strip()] = 0.0
    return weights.get("gzip", weights.get("*", 0.0)) > 0
