"""A call of a running sidecar's API, for commands."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

from driftguard.cli.plain import plain, plain_object
from driftguard.errors import BadInput, DriftGuardError
from driftguard.records import UNREADABLE_JSON

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 45.0  # longer than the sidecar waits for its database, after which it says so
ROLLBACK_SECONDS = 700.0  # it waits for the engine, or for what restarts it
_KEY_NEEDED = "; set DRIFTGUARD_API_KEY to a key, which `driftguard keys create NAME` makes"


@dataclass(frozen=True, slots=True)
class Answer:
    """`text`: as it came; `found`: the JSON object in it, as it may be shown; `place`: whose it is."""

    text: str
    found: dict[str, Any]
    place: str

    def listed(self, name: str) -> list[Any]:
        """Raises DriftGuardError: another server has answered."""
        found = self.found.get(name)
        if not isinstance(found, list):
            raise DriftGuardError(f"{self.place} is no sidecar: its answer has no {name}")
        return found


def call(
    method: str,
    base_url: str,
    path: str,
    body: Mapping[str, Any] | None = None,
    *,
    query: Mapping[str, Any] | None = None,
    seconds: float = ANSWER_SECONDS,
) -> Answer:
    """The sidecar's answer; the key is DRIFTGUARD_API_KEY, where that is set. Values of `query` that are None
    are left out.

    Raises BadInput (the address, the key, or what the sidecar finds wrong with the input), DriftGuardError:
    no answer, not that of a sidecar, or title and detail of its problem document.
    """
    with _answering(method, base_url, path, body, query, seconds) as answer:
        answer.read()
        return Answer(answer.text, _object(base_url, answer), without_password(base_url))


def export(base_url: str, path: str, query: Mapping[str, Any]) -> Iterator[bytes]:
    """The answer as it comes. Raises as `call` does, and DriftGuardError where it ends too early."""
    with _answering("GET", base_url, path, None, query, ANSWER_SECONDS) as answer:
        yield from answer.iter_bytes()


@contextmanager
def _answering(
    method: str,
    base_url: str,
    path: str,
    body: Mapping[str, Any] | None,
    query: Mapping[str, Any] | None,
    seconds: float,
) -> Iterator[httpx.Response]:
    """The answer, whose body is still to be read, where it is no error."""
    place = without_password(base_url)
    if not base_url.startswith(("http://", "https://")):
        raise BadInput(f"--sidecar: {place} does not begin with http:// or https://")
    # As `settings.secrets.key_given`, which would load all settings.
    key = os.environ.get("DRIFTGUARD_API_KEY", "").strip()
    if not all("!" <= character <= "~" for character in key):  # the error of the HTTP library would show it
        raise BadInput("DRIFTGUARD_API_KEY: holds a space, a line break or another character that no key has")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    given = {name: value for name, value in (query or {}).items() if value is not None}
    try:
        url = httpx.URL(base_url.rstrip("/") + path)
        with httpx.stream(
            method,
            url,
            json=body,
            params=given,
            headers=headers,
            timeout=httpx.Timeout(seconds, connect=CONNECT_SECONDS),
        ) as answer:
            if not answer.is_success:
                answer.read()
                _refuse(place, answer)
            yield answer
    except (httpx.InvalidURL, UnicodeError):  # its text may be a part of the password
        raise BadInput(f"--sidecar: {place} is not an address") from None
    except httpx.HTTPError as error:
        raise DriftGuardError(
            f"no answer from {place}: {error or type(error).__name__}; is `driftguard serve` running there? "
            "--sidecar or DRIFTGUARD_SIDECAR names another address"
        ) from None


def _refuse(base_url: str, answer: httpx.Response) -> None:
    """Raises what the problem document says (RFC 9457)."""
    problem = _object(base_url, answer)
    if answer.status_code == HTTPStatus.NOT_FOUND and "title" not in problem:  # as a serving engine's
        raise DriftGuardError(f"{base_url} is no sidecar: it has no {answer.request.url.path}")
    title = problem.get("title", f"HTTP {answer.status_code}")
    told = ": ".join(str(part) for part in (title, problem.get("detail")) if part)
    if answer.status_code == HTTPStatus.UNPROCESSABLE_ENTITY:
        raise BadInput(told)
    if answer.status_code == HTTPStatus.UNAUTHORIZED:
        told += _KEY_NEEDED
    raise DriftGuardError(told)


def _object(base_url: str, answer: httpx.Response) -> dict[str, Any]:
    try:
        found = answer.json()
    except UNREADABLE_JSON:
        found = None
    if not isinstance(found, dict):
        told = f"{without_password(base_url)} is no sidecar: its answer ({answer.status_code}) is not JSON"
        raise DriftGuardError(told)
    return {plain(name): plain_object(member) for name, member in found.items()}


def without_password(url: str) -> str:
    scheme, separator, rest = url.partition("://") if "://" in url else ("", "", url)
    return f"{scheme}{separator}{rest.rpartition('@')[2]}"
