"""Masks the secrets of the settings in all output: logs, error texts, answers, stored rows; and what of a
foreign text these rows cannot hold.

The password of a URL is a secret, and so are the path and query of a webhook's URL: everybody who knows it
can post.
"""

from __future__ import annotations

import json
import logging
import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Final, TextIO
from urllib.parse import quote, quote_plus, unquote, unquote_plus, urlsplit

MASK: Final = "***"
UNREADABLE: Final = "(an address that cannot be read)"
LEAST_CHARACTERS: Final = 4  # of a secret; masking a shorter one would mask half of every line
_LEAST_PATH_CHARACTERS: Final = 8  # of a part of a path: "hook" is not a secret
_WORD: Final = re.compile("[a-z]{1,15}")  # nor is "services", whose mask would be in many lines
_OWN: Final = "driftguard"  # as a path of its own
_DATABASE_SECRET: Final = re.compile("password|secret|scram")  # of the names of libpq's options
# SQLAlchemy takes / ? # in it as they are, at which the parser of addresses ends the part with the password.
_DATABASE_PASSWORD: Final = re.compile(r"^[^:]+://[^:/@]*:([^@]*)@")
_ADDRESS: Final = re.compile(
    r"^([A-Za-z][A-Za-z0-9+.-]*://)(?:[^/?#]*@)?(\[[0-9a-fA-F:.]*\]|[^/?#@:\[\]]*)(:[0-9]*)?"
)  # a port is digits only: part of a password that was not percent-encoded could be there


def address(url: str) -> str:
    """Scheme, host and port: what may be shown of any URL."""
    found = _ADDRESS.match(url)
    return "".join(part or "" for part in found.groups()) if found else UNREADABLE


def storable(told: str) -> str:
    """Without what PostgreSQL cannot hold: NUL, and half of a pair of surrogates."""
    return told.replace("\0", "").encode(errors="replace").decode()


def secrets_of_url(url: str, *, is_webhook: bool = False) -> Iterator[str]:
    """Its password (or its user name, if there is no password), the values of its query; a webhook's path
    too. Of a database only passwords."""
    try:
        parts = urlsplit(url)
    except ValueError:
        return
    userinfo = parts.netloc.rpartition("@")[0]
    if parts.scheme.startswith("postgres"):  # what is no password there is in every other line of a log
        yield userinfo.partition(":")[2]
        yield from _DATABASE_PASSWORD.findall(url)
        pairs = (pair.partition("=") for pair in parts.query.split("&"))
        yield from (value for name, _, value in pairs if _DATABASE_SECRET.search(unquote(name)))
        return
    yield userinfo.partition(":")[2] or userinfo
    yield b64encode(unquote(userinfo).encode()).decode()  # as in the Authorization header
    yield from (pair.partition("=")[2] or pair for pair in parts.query.split("&"))
    if is_webhook:
        path = parts.path.strip("/")
        alone = [part for part in path.split("/") if not _WORD.fullmatch(part)]
        yield from (part for part in [path, *alone] if len(part) >= _LEAST_PATH_CHARACTERS and part != _OWN)


class Secrets:
    """Replaces each of these values, also in the escaped forms of JSON, repr() and URLs, by three
    asterisks. White space around one, as of a file that ends its line, is no part of it."""

    def __init__(self, values: Iterable[str]) -> None:
        alone = (each for value in values for each in (value, value.strip()))
        forms = {form for value in alone for form in _forms(value) if len(form) >= LEAST_CHARACTERS}
        longest_first = sorted(forms, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first))) if forms else None

    def masked(self, text: str) -> str:
        return self._pattern.sub(MASK, text) if self._pattern else text


class UnfailingStream:
    """A log's stream. What cannot be written, as on a full disk or to a reader that has gone, is left out: an
    error of the log would end whoever logs. It is asked for each time, as it may be replaced; None: there is
    none."""

    def __init__(self, stream: Callable[[], TextIO | None]) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError, ValueError):  # the latter: it is closed
            if (stream := self._stream()) is not None:
                stream.write(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            if (stream := self._stream()) is not None:
                stream.flush()


class MaskingFormatter(logging.Formatter):
    """Masks whole lines, tracebacks included."""

    def __init__(self, secrets: Secrets, form: str) -> None:
        super().__init__(form)
        self._secrets = secrets

    def format(self, record: logging.LogRecord) -> str:
        return self._secrets.masked(super().format(record))


def _forms(value: str) -> Iterator[str]:
    for plain in {value, unquote(value), unquote_plus(value)}:
        yield plain
        yield quote(plain)
        yield quote(plain, safe="")
        yield quote_plus(plain)
        yield repr(plain)[1:-1]
        yield repr(plain.encode(errors="replace"))[2:-1]
        yield ascii(plain)[1:-1]
        yield json.dumps(plain)[1:-1]
        yield json.dumps(plain, ensure_ascii=False)[1:-1]
