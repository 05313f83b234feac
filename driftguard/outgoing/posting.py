"""One POST to a receiver that may hang, or send too slowly or too much: it ends at a deadline, and at most 64
kB of the answer are read.

The client's own timeouts are for each operation: a receiver that sends a byte every five seconds never
reaches them. So the whole exchange is a task that is cancelled at the deadline, which closes the connection.
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Final, cast

import httpx
import msgspec

from driftguard.masking import Secrets, address, secrets_of_url

DEADLINE_SECONDS: Final = 10.0
MAX_ANSWER_BYTES: Final = 65_536
_HEADERS: Final = {"Content-Type": "application/json", "Accept-Encoding": "identity"}


class NotAnswered(Exception):
    """{why there was no answer}; names no secret"""


@dataclass(frozen=True, slots=True)
class Answer:
    """`text`: the first MAX_ANSWER_BYTES of its body, or as much as arrived before the deadline, without the
    secrets of the request. `problem`: why the body is incomplete or unreadable. `date`: by the clock of who
    answers, where it tells."""

    status: int
    text: str = ""
    problem: str | None = None
    retry_after_seconds: float | None = None
    date: datetime | None = field(default=None, compare=False)

    @property
    def is_success(self) -> bool:
        return 200 <= self.status < 300


def post(
    url: str,
    body: object,
    headers: Mapping[str, str],
    *,
    deadline_seconds: float = DEADLINE_SECONDS,
) -> Answer:
    """Posts `body` as JSON to a webhook or the like. Redirects are not followed; `text` names their target.

    Raises NotAnswered: no connection, no status in time, or an address that cannot be used. A status that
    arrived in time is an answer, even if its body is incomplete.
    """
    key = headers.get("Authorization", "").rpartition(" ")[2]
    secrets = Secrets([*secrets_of_url(url, is_webhook=True), key])
    # Not asyncio.run(), which would wait for a name look-up that hangs.
    loop = asyncio.new_event_loop()
    try:
        return loop.run_until_complete(
            _exchange(url, msgspec.json.encode(body), {**_HEADERS, **headers}, deadline_seconds, secrets)
        )
    finally:
        loop.close()


async def _exchange(
    url: str, body: bytes, headers: Mapping[str, str], deadline_seconds: float, secrets: Secrets
) -> Answer:
    deadline = asyncio.get_running_loop().time() + deadline_seconds
    try:
        async with httpx.AsyncClient(timeout=deadline_seconds, verify=authorities()) as client:
            async with asyncio.timeout_at(deadline):
                request = client.build_request("POST", url, content=body, headers=headers)
                answer = await client.send(request, stream=True)
            try:
                return replace(await _read(answer, deadline, secrets), date=_date(answer.headers))
            finally:
                await answer.aclose()
    except TimeoutError:
        raise NotAnswered(f"no answer within {deadline_seconds:g} s") from None
    except httpx.InvalidURL:
        raise NotAnswered(f"{address(url)} is not an address that can be posted to") from None
    except (httpx.HTTPError, OSError) as error:
        raise NotAnswered(secrets.masked(f"{type(error).__name__}: {error}")) from None


async def _read(answer: httpx.Response, deadline: float, secrets: Secrets) -> Answer:
    """The status is valid, even if reading the body fails."""
    status, retry_after = answer.status_code, _retry_after_seconds(answer.headers)
    if answer.has_redirect_location:
        return Answer(status, f"a redirect to {_leads_to(answer)}, which is not followed", None, retry_after)
    encoding = answer.headers.get("content-encoding", "identity")
    if encoding != "identity":  # decompressed, it could have any length
        return Answer(status, "", f"the answer is encoded ({encoding}), which was not asked for", retry_after)
    content, problem = bytearray(), None
    chunks = aclosing(cast("AsyncGenerator[bytes]", answer.aiter_raw()))
    try:
        async with asyncio.timeout_at(deadline), chunks as parts:
            async for chunk in parts:
                content += chunk
                if len(content) > MAX_ANSWER_BYTES:
                    problem = f"the answer is longer than {MAX_ANSWER_BYTES:,} bytes"
                    break
    except TimeoutError:
        problem = "the answer did not end in time"
    except httpx.HTTPError as error:
        problem = f"the answer broke off ({type(error).__name__})"
    text = secrets.masked(content[:MAX_ANSWER_BYTES].decode(errors="replace"))
    return Answer(status, text, problem, retry_after)


def _leads_to(answer: httpx.Response) -> str:
    location = answer.headers["location"]
    return address(location) if "://" in location else "another path of the same server"


def _date(headers: httpx.Headers) -> datetime | None:
    try:
        told = parsedate_to_datetime(headers.get("date", ""))
    except (ValueError, OverflowError):
        return None
    return told.astimezone(UTC)


def _retry_after_seconds(headers: httpx.Headers) -> float | None:
    """In seconds, or as a date by the receiver's clock (RFC 9110 §10.2.3). None: missing, or unreadable."""
    told = headers.get("retry-after", "").strip()
    if told.isdecimal():
        return float(told)
    try:
        until = parsedate_to_datetime(told)
        now = parsedate_to_datetime(headers["date"]) if "date" in headers else datetime.now(UTC)
        return max(0.0, (until - now).total_seconds())
    except (ValueError, OverflowError, TypeError):  # the last: only one of the two times has a time zone
        return None


@cache
def authorities() -> ssl.SSLContext:
    """By which receivers are trusted: SSL_CERT_FILE and SSL_CERT_DIR of the environment, else those of
    certifi. Read once: it takes a tenth of a second. Raises ValueError."""
    try:
        return httpx.create_ssl_context()
    except OSError as error:  # ssl's own errors too
        file = os.environ.get("SSL_CERT_FILE")
        raise ValueError(f"SSL_CERT_FILE: no certificates in {file} ({error})") from None
