"""A reverse proxy that serves an application under a path of its own, as nginx would."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from tests.api.ingest_server import serving

PREFIX = "/driftguard"
EXTERNAL_URL = f"https://ops.example.com{PREFIX}/"
# `proxy_pass http://sidecar;` passes the prefix on, `proxy_pass http://sidecar/;` strips it.
Form = Literal["passes it on", "strips it"]
FORMS: tuple[Form, ...] = ("passes it on", "strips it")

_METHODS = ("GET", "HEAD", "POST", "PUT", "DELETE", "OPTIONS")
_OF_THE_CONNECTION = ("connection", "content-length", "transfer-encoding")


@contextmanager
def behind(sidecar: httpx.Client, form: Form) -> Iterator[httpx.Client]:
    """A client of the proxy, which has nothing but the sidecar under PREFIX."""
    place = str(sidecar.base_url).rstrip("/")

    async def forward(request: Request) -> Response:
        path = request.scope["raw_path"].decode()
        if not path.startswith(f"{PREFIX}/"):
            return PlainTextResponse("the proxy serves something else here", 404)
        if form == "strips it":
            path = path.removeprefix(PREFIX)
        async with httpx.AsyncClient(timeout=60) as to_sidecar:
            answer = await to_sidecar.request(
                request.method,
                f"{place}{path}?{request.url.query}".rstrip("?"),
                headers={**request.headers, "x-forwarded-for": "203.0.113.7", "accept-encoding": "identity"},
                content=await request.body(),
            )
        headers = {name: value for name, value in answer.headers.items() if name not in _OF_THE_CONNECTION}
        return Response(answer.content, answer.status_code, headers)

    with serving(Starlette(routes=[Route("/{path:path}", forward, methods=_METHODS)])) as client:
        yield client
