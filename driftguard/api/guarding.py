"""What the sidecar checks before a request is routed; see driftguard_http.guard."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from fastapi import FastAPI, Request, Response
from starlette.middleware.gzip import DEFAULT_EXCLUDED_CONTENT_TYPES
from starlette.types import Scope

from driftguard.api.auth import KeyChecks, is_open
from driftguard.api.compression import Compression
from driftguard.api.context import Context
from driftguard.api.exports import MEDIA_TYPES
from driftguard.api.otlp.errors import PATHS, status_response
from driftguard.api.prefix import Prefix, path_of
from driftguard.api.problems import TooSlow, problem_response
from driftguard.errors import DatabaseUnavailable, Forbidden, TooLarge, Unauthorized
from driftguard.settings import Settings
from driftguard_http import Guard, Origins, Refusal, Route
from driftguard_http.origins import SAFE_METHODS

COMPRESSED_BYTES: Final = 1_000
COMPRESSION_LEVEL: Final = 3  # a higher level takes three times as long, and makes metrics hardly smaller
SMALL_BODY_BYTES: Final = 64_000
BATCHES: Final = frozenset({"/api/v1/records", "/api/v1/captures", *PATHS})
CAPTURED_TEXT: Final = "/api/v1/captures"
INCIDENT: Final = "/api/v1/incidents/"
TITLES: Final = {
    error.status: error.title for error in (Unauthorized, Forbidden, TooSlow, TooLarge, DatabaseUnavailable)
}
# A browser asks its user for a login where it opens a page; a button's call must not make it ask.
LOGIN: Final = {"WWW-Authenticate": 'Bearer realm="driftguard", Basic realm="driftguard"'}
ALWAYS_OPEN: Final = frozenset({"/healthz", "/readyz"})  # health checks have no key


def install_guard(app: FastAPI, context: Context) -> None:
    """In front of everything that `app` routes. Call it once, before the first request."""
    app.add_middleware(
        Compression,
        minimum_size=COMPRESSED_BYTES,
        compresslevel=COMPRESSION_LEVEL,
        exclude_content_types=(*DEFAULT_EXCLUDED_CONTENT_TYPES, MEDIA_TYPES["parquet"]),
    )
    settings = context.settings
    app.add_middleware(
        Guard,
        origins=Origins(settings.host, settings.http.allowed_hosts, settings.alerting.external_url),
        route_of=lambda scope: route_of(scope, settings),
        check_key=KeyChecks(context.database).check,
        answer=_answer,
    )
    if prefix := settings.alerting.prefix:
        app.add_middleware(Prefix, prefix=prefix)  # the last one added is the first one asked


def route_of(scope: Scope, settings: Settings) -> Route:
    """By method and path. Where keys are needed, every write and captured text need one. An incident, which
    shows captured text to those who have a key, is shown without one too, and with a login that is for
    another, such as a proxy in front; a key that is sent as one must be valid."""
    path = path_of(scope).rstrip("/")
    is_write = scope["method"] not in SAFE_METHODS
    guarded = is_write or path == CAPTURED_TEXT
    given = next((value for name, value in scope["headers"] if name == b"authorization"), b"")
    guarded |= path.startswith(INCIDENT) and given[:7].lower() == b"bearer "
    if settings.http.require_key_to_read:
        guarded = path not in ALWAYS_OPEN
    by_key = not is_open(scope, settings.host)
    return Route(
        needs_key=guarded and by_key,
        most_bytes=settings.ingest.max_batch_bytes if path in BATCHES else SMALL_BODY_BYTES,
        takes_key=path.startswith(INCIDENT) and given != b"" and by_key,
    )


def _answer(scope: Scope, refusal: Refusal) -> Response:
    headers = dict(refusal.headers or {})
    if refusal.status_code == HTTPStatus.UNAUTHORIZED and scope["method"] in SAFE_METHODS:
        headers |= LOGIN
    if path_of(scope) in PATHS:
        return status_response(Request(scope), refusal.status_code, refusal.detail, headers)
    title = TITLES.get(refusal.status_code)
    return problem_response(refusal.status_code, refusal.detail, title=title, headers=headers)
