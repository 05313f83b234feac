"""Errors of the web pages: a page for a browser, a problem document for everything else."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute

from driftguard.api.pages.rendering import render
from driftguard.api.problems import headers_of, invalid_fields
from driftguard.errors import BadInput, DriftGuardError


class PageRoute(APIRoute):
    """A route whose errors a browser can show."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        answer = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await answer(request)
            except (DriftGuardError, RequestValidationError) as error:
                if "text/html" not in request.headers.get("accept", ""):
                    raise
                return _page(error)

        return handle


def _page(error: DriftGuardError | RequestValidationError) -> Response:
    if isinstance(error, RequestValidationError):
        error = BadInput(invalid_fields(error))
    headers = headers_of(error)
    page = render(
        "problem.html", title=error.title, detail=error.detail, retry_seconds=headers.get("Retry-After")
    )
    page.status_code = error.status
    page.headers.update(headers)
    return page
