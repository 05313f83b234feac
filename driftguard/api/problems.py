"""Every error is answered as RFC 9457 problem+json: it names what was wrong, and shows no internals."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

import msgspec
import structlog
from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException

from driftguard.api.prefix import path_of
from driftguard.errors import Busy, DatabaseUnavailable, DriftGuardError, Unauthorized
from driftguard.records import RecordError

DATABASE_RETRY_SECONDS: Final = 5
OUTAGE_LOG_SECONDS: Final = 5.0  # between two lines about requests that failed for want of the database
_MAX_LISTED: Final = 100  # errors in one answer
_log = structlog.get_logger(__name__)


class MalformedBody(DriftGuardError):
    """The body is not what its content type says: not JSON, broken gzip, empty."""

    status = 400
    title = "Malformed body"


class TooSlow(DriftGuardError):
    """The body arrives too slowly."""

    status = 408
    title = "Request timeout"


class UnsupportedEncoding(DriftGuardError):
    """The Content-Encoding is not supported here."""

    status = 415
    title = "Unsupported content encoding"


class UnsupportedContent(DriftGuardError):
    """The Content-Type is not supported here."""

    status = 415
    title = "Unsupported content type"


class MissingExtra(DriftGuardError):
    """The request needs an optional package that is not installed; the message names it."""

    status = 501
    title = "Not installed"


class FailureLog:
    """Logs requests that failed. While the database is away, one line every OUTAGE_LOG_SECONDS for all of
    them: there may be hundreds of senders, and each tries again every few seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._requests = 0  # that no line has told
        self._silent_until = -math.inf  # by the clock

    def tell(self, error: DriftGuardError) -> None:
        if not isinstance(error, DatabaseUnavailable):
            _log.error("request_failed", title=error.title, detail=error.detail)
            return
        self._requests += 1
        if (now := self._clock()) >= self._silent_until:
            _log.error("request_failed", title=error.title, detail=error.detail, requests=self._requests)
            self._requests, self._silent_until = 0, now + OUTAGE_LOG_SECONDS


failures: Final = FailureLog()


def problem_response(
    status: int,
    detail: str,
    *,
    title: str | None = None,
    headers: dict[str, str] | None = None,
    **members: object,
) -> Response:
    """A problem document (RFC 9457 §3); `members` are its extension members."""
    body = {
        "type": "about:blank",
        "title": title or HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        **members,
    }
    return Response(
        msgspec.json.encode(body), status_code=status, headers=headers, media_type="application/problem+json"
    )


def record_errors(errors: list[RecordError]) -> dict[str, object]:
    """The members `errors` (the first 100, each with line, field and detail) and `errors_total`."""
    shown = [{"line": e.line, "field": e.field, "detail": e.detail} for e in errors[:_MAX_LISTED]]
    return {"errors": shown, "errors_total": len(errors)}


def headers_of(error: DriftGuardError) -> dict[str, str]:
    """The headers of an answer with this error, in any format."""
    if isinstance(error, Busy):
        return {"Retry-After": str(error.retry_after_seconds)}
    if isinstance(error, DatabaseUnavailable):
        return {"Retry-After": str(DATABASE_RETRY_SECONDS)}
    return {"WWW-Authenticate": 'Bearer realm="driftguard"'} if isinstance(error, Unauthorized) else {}


def install_problem_handlers(app: FastAPI) -> None:
    """Makes every error of `app` a problem document."""
    app.add_exception_handler(DriftGuardError, _known)
    app.add_exception_handler(RequestValidationError, _invalid)
    app.add_exception_handler(HTTPException, http_problem)
    app.add_exception_handler(Exception, unexpected_problem)


async def _known(_request: Request, error: Exception) -> Response:
    assert isinstance(error, DriftGuardError)  # noqa: S101 (registered for this class only)
    headers = headers_of(error)
    if error.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        failures.tell(error)
    return problem_response(error.status, error.detail, title=error.title, headers=headers, **error.members)


async def _invalid(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)  # noqa: S101 (registered for this class only)
    errors = _errors(error)
    return problem_response(422, invalid_fields(error), title="Bad input", errors=errors)


def invalid_fields(error: RequestValidationError) -> str:
    """What is wrong with each field, in one line."""
    return "; ".join(f"{item['field'] or item['in']}: {item['detail']}" for item in _errors(error))


def _errors(error: RequestValidationError) -> list[dict[str, str | None]]:
    return [
        {
            "in": str(item["loc"][0]),
            "field": ".".join(str(part) for part in item["loc"][1:]) or None,
            "detail": str(item["msg"]).removeprefix("Value error, "),
        }
        for item in error.errors()
    ]


async def http_problem(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)  # noqa: S101 (registered for this class only)
    detail = str(error.detail)
    if detail == "There was an error parsing the body":  # FastAPI's message for bytes that are not text
        return problem_response(400, "the body is not JSON text", title=MalformedBody.title)
    if error.status_code == HTTPStatus.NOT_FOUND and detail == HTTPStatus.NOT_FOUND.phrase:
        detail = f"{path_of(request.scope)}: not found"
    headers = dict(error.headers or {})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        detail = f"{path_of(request.scope)} does not support {request.method}"
        # A path may have more than one route, and Starlette names the methods of the first.
        operations = request.app.openapi()["paths"].get(path_of(request.scope), {})
        headers |= {"Allow": ", ".join(sorted(operations)).upper()} if operations else {}
    return problem_response(error.status_code, detail, headers=headers)


async def unexpected_problem(request: Request, error: Exception) -> Response:
    _log.error("unexpected_error", method=request.method, path=request.url.path, exc_info=error)
    return problem_response(500, "an unexpected error; the sidecar's log has it", title="Internal error")
