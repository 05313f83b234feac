"""Errors as the client expects them: OpenAI's error object under /v1, else problem+json (RFC 9457)."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from driftguard_engine.core import EngineError
from driftguard_engine.server.body import NOT_TEXT, FieldError

RETRY_AFTER_SECONDS = 1
OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}
CODES = {
    400: "invalid_request",
    401: "invalid_api_key",
    403: "forbidden",
    404: "not_found",
    405: "method_not_allowed",
    413: "request_too_large",
    429: "no_room",
}
LONGEST_SHOWN_VALUE = 60
BODY_FIELDS = {"prompt_token_ids": "prompt", "draft": "directory"}  # whose name is another inside the engine


def openai_error(status: int, message: str, param: str | None, code: str) -> dict[str, Any]:
    """OpenAI's error object."""
    kind = OPENAI_TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(
    request: Request,
    status: int,
    message: str,
    code: str,
    field: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> JSONResponse:
    message = _encodable(message)
    if request.url.path.startswith("/v1"):
        return JSONResponse(openai_error(status, message, field, code), status, headers)
    problem = {"type": "about:blank", "title": HTTPStatus(status).phrase, "status": status}
    problem |= {"detail": message, "code": code} | ({"field": field} if field else {})
    return JSONResponse(problem, status, headers, media_type="application/problem+json")


def install_error_handlers(app: FastAPI, refused: Callable[[str], None]) -> None:
    """refused: called with the error code of every request that is refused."""

    @app.exception_handler(EngineError)
    async def engine_error(request: Request, error: EngineError) -> JSONResponse:
        refused(error.code)
        headers = {"Retry-After": str(RETRY_AFTER_SECONDS)} if error.status == 429 else None
        field = BODY_FIELDS.get(error.field or "", error.field)
        return error_response(request, error.status, error.detail, error.code, field, headers)

    @app.exception_handler(RequestValidationError)
    async def invalid_body(request: Request, error: RequestValidationError) -> JSONResponse:
        refused("invalid_request")
        field, message = explain(error.errors()[0])
        status = 400 if request.url.path.startswith("/v1") else 422
        return error_response(request, status, message, "invalid_request", field)

    @app.exception_handler(HTTPException)
    async def http_error(request: Request, error: HTTPException) -> JSONResponse:
        code = CODES.get(error.status_code, "invalid_request")
        refused(code)
        message = str(error.detail)
        if error.status_code in (404, 405):
            message = f"{request.method} {request.url.path}: {message}"
        return error_response(request, error.status_code, message, code, headers=error.headers)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, _error: Exception) -> JSONResponse:
        refused("internal_error")
        return error_response(request, 500, "internal error; the server's log says more", "internal_error")


def explain(error: Mapping[str, Any]) -> tuple[str | None, str]:
    """(field, message) of one of pydantic's errors: what is wrong, what was given, what is allowed."""
    cause = error.get("ctx", {}).get("error")
    if error["type"] == "json_invalid":
        return None, f"the body is not valid JSON: {cause} at character {error['loc'][-1]}"
    if isinstance(cause, FieldError):
        return cause.field, f"{cause.field}: {cause}"
    field = shortened(".".join(str(part) for part in error["loc"][1:]))
    if error["type"] == "string_unicode" and not field:
        return None, f"the body: a field's name {NOT_TEXT}"
    if not field:
        return None, "the body must be a JSON object, sent with Content-Type: application/json"
    if error["type"] == "extra_forbidden":
        return field, f"{field}: unknown field; it is refused, not ignored"
    if error["type"] == "missing":
        return field, f"{field}: missing; this field is required"
    reason = str(cause) if isinstance(cause, ValueError) else error["msg"][:1].lower() + error["msg"][1:]
    return field, f"{field}: {reason}, not {_shown(error['input'])}"


def _encodable(text: str) -> str:
    """The text without lone surrogates: those of a request must not break the answer that refuses it."""
    return text.encode("utf-8", "backslashreplace").decode()


def _shown(value: Any) -> str:
    text = ""
    try:
        for part in json.JSONEncoder().iterencode(value):  # not all of it: it may be megabytes
            text += part
            if len(text) > LONGEST_SHOWN_VALUE:
                break
    except (TypeError, ValueError, RecursionError):
        text = ascii(value)
    return shortened(text)


def shortened(text: str) -> str:
    return text if len(text) <= LONGEST_SHOWN_VALUE else text[: LONGEST_SHOWN_VALUE - 3] + "..."
