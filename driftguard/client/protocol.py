"""The HTTP part of both clients: requests, the meaning of answers, and when to try again."""

from __future__ import annotations

import os
import ssl
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

import httpx
import msgspec
from tenacity import RetryCallState, wait_random_exponential

from driftguard.client.answers import BatchCounts
from driftguard.errors import BadInput, Conflict, DriftGuardError, Forbidden, NotFound, TooLarge, Unauthorized
from driftguard.records import RecordError

Answer = TypeVar("Answer")
RECORDS: Final = "/api/v1/records"
UNRECORDED: Final = "/api/v1/unrecorded"
REPORT_SECONDS: Final = 15.0  # between two reports of unrecorded requests
JSON_LINES: Final = {"Content-Type": "application/x-ndjson"}
TIMEOUT: Final = httpx.Timeout(30.0, connect=2.0)  # the sidecar answers after its commit
INCIDENTS_PER_PAGE: Final = 100
REASONS: Final = 5  # logged at most
ATTEMPTS: Final = 4  # of a call in the foreground; background sends are repeated without limit
LONGEST_RETRY_AFTER_SECONDS: Final = 300.0
_ERRORS: Final = {
    error.status: error for error in (BadInput, Conflict, Forbidden, NotFound, TooLarge, Unauthorized)
}
_UNREADABLE: Final = (ValueError, RecursionError)  # not of this form, not JSON, not UTF-8, nested without end
_backoff = wait_random_exponential(multiplier=0.2, max=5.0)


class SidecarUnavailable(DriftGuardError):
    """{what the sidecar answered, or why it could not be reached}; may be tried again later."""

    status = 503
    title = "Sidecar unavailable"

    def __init__(self, detail: str, *, retry_after_seconds: float | None = None) -> None:
        super().__init__(detail)
        self.retry_after_seconds = retry_after_seconds


class RefusedRecords(BadInput):
    """The sidecar refuses some of the records; the others are stored.

    `errors`: at most 100 pairs (index in the list that was sent, from 0; reason). `refused`: their number in
    all.
    """

    def __init__(self, detail: str, errors: list[tuple[int, RecordError]], *, refused: int) -> None:
        super().__init__(detail)
        self.errors = errors
        self.refused = refused


def address_of(url: str | httpx.URL) -> httpx.URL:
    """Of a sidecar. Raises ValueError, without the address, which may hold a password."""
    try:
        found = httpx.URL(url)
    except httpx.InvalidURL:
        raise ValueError("url: its host or port cannot be read") from None
    if found.scheme not in ("http", "https") or not found.host:
        raise ValueError("url: not an http:// or https:// address")
    return found


def headers(api_key: str | None) -> dict[str, str]:
    """White space around the key, as of a file that ends its line, is no part of it. Raises ValueError,
    without the key: it has characters that no header can hold; the HTTP library's error would show it."""
    key = (api_key or "").strip()
    if not all("!" <= character <= "~" for character in key):
        raise ValueError(
            "api_key: not a key: it has other characters than letters, digits and signs of ASCII"
        )
    return {"Authorization": f"Bearer {key}"} if key else {}


def authorities_for(address: httpx.URL) -> ssl.SSLContext:
    """By which the sidecar is trusted: SSL_CERT_FILE and SSL_CERT_DIR of the environment, else those of
    certifi; none for http://. Reading them takes a tenth of a second. Raises ValueError."""
    if address.scheme != "https":
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        return httpx.create_ssl_context()
    except OSError as error:  # ssl's own errors too
        file = os.environ.get("SSL_CERT_FILE")
        raise ValueError(f"SSL_CERT_FILE: no certificates in {file} ({error})") from None


def body(lines: Sequence[bytes]) -> bytes:
    return b"\n".join(lines) + b"\n"


def incident_query(state: str | None, stream: int | None) -> dict[str, Any]:
    given = {"state": state, "stream": stream, "limit": INCIDENTS_PER_PAGE}
    return {name: value for name, value in given.items() if value is not None}


def unreachable(error: httpx.RequestError) -> SidecarUnavailable:
    return SidecarUnavailable(f"{type(error).__name__}: {error}")


def read(response: httpx.Response, kind: type[Answer]) -> Answer:
    """A successful answer as `kind`. Raises SidecarUnavailable (429, 5xx, no answer of a sidecar), or the
    error in the problem document."""
    if response.is_success:
        return _read_success(response, kind)
    status, problem = response.status_code, _decoded(response, _Problem)
    detail = (
        problem.detail if problem else f"HTTP {status}: {response.content[:300].decode(errors='replace')}"
    )
    is_foreign = status == BadInput.status and not problem
    if status == httpx.codes.TOO_MANY_REQUESTS or response.is_server_error or is_foreign:
        raise SidecarUnavailable(detail, retry_after_seconds=_retry_after(response))
    raise _ERRORS.get(status, DriftGuardError)(detail)


def read_counts(response: httpx.Response) -> BatchCounts:
    """The counts of a batch. Raises RefusedRecords, and what `read` raises."""
    problem = _decoded(response, _Refusals) if response.status_code == BadInput.status else None
    if problem is None:
        return read(response, BatchCounts)
    errors = [(error.line - 1, RecordError(error.detail, field=error.field)) for error in problem.errors]
    raise RefusedRecords(problem.detail, errors, refused=problem.errors_total)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a batch that was sent in the background; `reasons`: of the first refusals."""

    sent: int
    refused: int = 0
    reasons: tuple[str, ...] = ()


def outcome(response: httpx.Response, lines: Sequence[bytes]) -> Outcome:
    """Raises SidecarUnavailable (send it again later), TooLarge (send it in parts)."""
    try:
        read_counts(response)
    except RefusedRecords as error:
        reasons = tuple(
            f"{why}: {b''.join(lines[place : place + 1]).decode()}" for place, why in error.errors[:REASONS]
        )
        return Outcome(len(lines) - error.refused, error.refused, reasons)
    except TooLarge as error:
        if len(lines) > 1:
            raise
        return Outcome(0, 1, (error.detail,))
    except BadInput as error:
        return Outcome(0, len(lines), (error.detail,))
    except SidecarUnavailable:
        raise
    except DriftGuardError as error:  # a missing key, a wrong address: not an error of the records
        raise SidecarUnavailable(error.detail) from error
    return Outcome(len(lines))


def seconds_to_wait(state: RetryCallState) -> float:
    """The sidecar's Retry-After, else a growing random time."""
    error = state.outcome.exception() if state.outcome else None
    asked = error.retry_after_seconds if isinstance(error, SidecarUnavailable) else None
    return _backoff(state) if asked is None else asked


class _RefusedLine(msgspec.Struct):
    line: Annotated[int, msgspec.Meta(ge=1)]
    field: str | None
    detail: str


class _Refusals(msgspec.Struct):
    detail: str
    errors: list[_RefusedLine]
    errors_total: int


class _Problem(msgspec.Struct):
    detail: str


for _kind in (_Refusals, _Problem):
    msgspec.json.Decoder(_kind)  # looks at the type now: see answers.py


def _read_success(response: httpx.Response, kind: type[Answer]) -> Answer:
    try:
        return msgspec.json.decode(response.content, type=kind)
    except _UNREADABLE as error:
        address = response.url.copy_with(userinfo=b"")
        raise SidecarUnavailable(f"{address} does not answer like a sidecar: {error}") from error


def _decoded(response: httpx.Response, kind: type[Answer]) -> Answer | None:
    try:
        return msgspec.json.decode(response.content, type=kind)
    except _UNREADABLE:
        return None


def _retry_after(response: httpx.Response) -> float | None:
    text = response.headers.get("retry-after", "")
    return min(float(text), LONGEST_RETRY_AFTER_SECONDS) if text.isdecimal() else None
