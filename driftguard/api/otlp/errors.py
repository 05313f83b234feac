"""Errors in OTLP's own form: a google.rpc.Status in the encoding of the request.

Source: the OTLP specification, "OTLP/HTTP Response".
"""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, Final

import msgspec
import structlog
from fastapi import Request, Response
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException

from driftguard.api.context import get_context
from driftguard.api.otlp.encoding import JSON, PROTOBUF
from driftguard.api.problems import (
    MalformedBody,
    MissingExtra,
    TooSlow,
    UnsupportedContent,
    failures,
    headers_of,
)
from driftguard.errors import (
    BadInput,
    Busy,
    DatabaseUnavailable,
    DriftGuardError,
    Forbidden,
    TooLarge,
    Unauthorized,
)

PATHS: Final = frozenset({"/v1/traces", "/v1/metrics"})
RETRY_AFTER_SECONDS: Final = 5  # while the database is unavailable
_BAD_REQUEST: Final = "type.googleapis.com/google.rpc.BadRequest"
# google.rpc.Code
_CODES: Final = {400: 3, 401: 16, 403: 7, 408: 4, 413: 8, 415: 3, 429: 8, 501: 12, 503: 14}
_INTERNAL: Final = 13
_EXAMPLES: Final[dict[type[DriftGuardError], str]] = {
    MalformedBody: "the body is not an ExportMetricsServiceRequest (Error parsing message)",
    Unauthorized: "this call needs an API key: Authorization: Bearer KEY",
    Forbidden: "Host 'evil.example' is not a name of this server; see http.allowed_hosts",
    TooSlow: "the body came too slowly",
    TooLarge: "the body is larger than 6000000 bytes; send smaller batches",
    UnsupportedContent: "Content-Type 'text/plain' is not supported; send application/x-protobuf",
    Busy: "50000 records wait for the database and 50000 is the limit; send the batch again later",
    MissingExtra: "protobuf needs opentelemetry-proto; pip install 'driftguard-llm[otlp]'",
    DatabaseUnavailable: "database 'driftguard' at db.internal:5432: connection refused",
}
_log = structlog.get_logger(__name__)

Handler = Callable[[Request], Coroutine[Any, Any, Response]]


class OtlpRoute(APIRoute):
    """A route whose errors exporters understand."""

    def get_route_handler(self) -> Handler:
        handle = super().get_route_handler()

        async def handle_or_tell(request: Request) -> Response:
            try:
                return await handle(request)
            except DriftGuardError as error:
                return _told(request, error)
            except HTTPException as error:
                headers = dict(error.headers or {})
                return status_response(request, error.status_code, str(error.detail), headers)
            except Exception:  # noqa: BLE001 (logged, and reported to the exporter)
                _log.exception("unexpected_error", method=request.method, path=request.url.path)
                return status_response(request, 500, "an unexpected error; the sidecar's log has it", {})

        return handle_or_tell


def refusals() -> dict[int | str, dict[str, Any]]:
    """`responses` of an operation with these errors."""
    found: dict[int | str, dict[str, Any]] = {}
    for error, detail in _EXAMPLES.items():
        status = json.loads(_status_json(_CODES[error.status], detail, is_bad=error.status == 400))
        content = {
            PROTOBUF: {"schema": {"type": "string", "format": "binary"}},
            JSON: {"schema": {"$ref": "#/components/schemas/RpcStatus"}, "example": status},
        }
        description = (error.__doc__ or error.title).partition("\n")[0]
        found.setdefault(error.status, {"description": description, "content": content})
    return found


def media_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def _told(request: Request, error: DriftGuardError) -> Response:
    status = HTTPStatus.BAD_REQUEST if isinstance(error, BadInput) else error.status
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        failures.tell(error)
    headers = headers_of(error)
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = str(RETRY_AFTER_SECONDS)
    return status_response(request, status, error.detail, headers)


def status_response(request: Request, status: int, message: str, headers: dict[str, str]) -> Response:
    """A google.rpc.Status in the encoding of the request."""
    if status < HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.TOO_MANY_REQUESTS:
        get_context(request).otlp_rejections.note_refused(request.url.path, status, message)
    code = _CODES.get(status, _INTERNAL)
    is_bad = status == HTTPStatus.BAD_REQUEST
    body = _status_protobuf(code, message, is_bad=is_bad) if media_type(request) == PROTOBUF else None
    if body is not None:
        return Response(body, status, headers, media_type=PROTOBUF)
    return Response(_status_json(code, message, is_bad=is_bad), status, headers, media_type=JSON)


def _status_protobuf(code: int, message: str, *, is_bad: bool) -> bytes | None:
    """`is_bad`: the data is bad, which a BadRequest says. None: without the `otlp` extra."""
    try:
        from google.rpc.error_details_pb2 import BadRequest
        from google.rpc.status_pb2 import Status
    except ImportError:
        return None
    status = Status(code=code, message=message)
    if is_bad:
        violation = BadRequest.FieldViolation(field="body", description=message)
        status.details.add().Pack(BadRequest(field_violations=[violation]))
    return bytes(status.SerializeToString())


def _status_json(code: int, message: str, *, is_bad: bool) -> bytes:
    status: dict[str, Any] = {"code": code, "message": message}
    if is_bad:
        violation = {"field": "body", "description": message}
        status["details"] = [{"@type": _BAD_REQUEST, "fieldViolations": [violation]}]
    return msgspec.json.encode(status)
