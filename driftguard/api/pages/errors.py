"""Errors of the web pages: a page for a browser, a problem document for everything else."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from driftguard.api.pages.rendering import render
from driftguard.api.prefix import path_of
from driftguard.api.problems import headers_of, http_problem, invalid_fields, unexpected_problem
from driftguard.errors import BadInput, DriftGuardError


def install_page_handlers(app: FastAPI) -> None:
    """Makes what no route answers a page too, where a browser asks for one."""
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(Exception, _unexpected)


async def _no_route(request: Request, error: Exception) -> Response:
    answer = await http_problem(request, error)
    return _shown(request, answer) if _wants_page(request) else answer


async def _unexpected(request: Request, error: Exception) -> Response:
    answer = await unexpected_problem(request, error)
    return _shown(request, answer) if _wants_page(request) else answer


def _wants_page(request: Request) -> bool:
    return "text/html" in request.headers.get("accept", "") and not path_of(request.scope).startswith("/api/")


def _shown(request: Request, problem: Response) -> Response:
    """A problem document as a page."""
    told = msgspec.json.decode(problem.body)
    page = render(request, "problem.html", title=told["title"], detail=told["detail"], retry_seconds=None)
    page.status_code = problem.status_code
    if "allow" in problem.headers:
        page.headers["Allow"] = problem.headers["allow"]
    return page


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
                return _page(request, error)

        return handle


def _page(request: Request, error: DriftGuardError | RequestValidationError) -> Response:
    if isinstance(error, RequestValidationError):
        error = BadInput(invalid_fields(error))
    headers = headers_of(error)
    page = render(
        request,
        "problem.html",
        title=error.title,
        detail=error.detail,
        retry_seconds=headers.get("Retry-After"),
    )
    page.status_code = error.status
    page.headers.update(headers)
    return page
