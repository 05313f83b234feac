"""An arriving request: its body, and the data for its record, or the reason for which it is not recorded."""

from __future__ import annotations

from collections.abc import AsyncIterator
from time import perf_counter
from typing import Final, Literal

import aiohttp
import msgspec
from aiohttp import HttpVersion11, web
from yarl import URL

from driftguard.adapters.answers.engines import Engine
from driftguard.proxy.asking import Unreadable, ask, kind_of
from driftguard.proxy.labels import is_probe
from driftguard.proxy.recording import NotRecorded, Passage, Reason
from driftguard.proxy.upstream import Upstream
from driftguard.settings import ProxySettings
from driftguard_http.room import Share

Body = bytes | AsyncIterator[bytes] | None
_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class Intake(msgspec.Struct, frozen=True):
    """`body` goes to the upstream. Either `passage` or `refusal` is set."""

    body: Body
    passage: Passage | None = None
    refusal: NotRecorded | None = None


async def take_in(
    request: web.BaseRequest,
    target: str,
    settings: ProxySettings,
    upstream: Upstream,
    in_flight: int,
    share: Share,
) -> Intake:
    """Reads the body only if the request is to be recorded and its body is not too large. Raises
    BadBody."""
    # To a client of HTTP/1.0, which knows no interim answer, it would be the answer (RFC 9110 §10.1.1).
    awaits_continue = request.headers.get("Expect", "").lower() == "100-continue"
    if awaits_continue and request.version >= HttpVersion11:
        await request.writer.write(_CONTINUE)
        request.writer.output_size = 0
    path = target.partition("?")[0]
    kind = kind_of(request.method, path)
    if kind is None:
        return _unread(request, "not_generation")
    if reason := _reason_not_to_look(request, upstream.engine):
        return _unread(request, reason)
    text, excess = await read_up_to(request.content, settings.max_inspected_bytes, share)
    if excess:
        rest = request.content.iter_any()
        return Intake(chained([text], rest, share), refusal=NotRecorded(excess))
    started = perf_counter()
    try:
        asked = ask(kind, upstream.engine, text, usage_always=settings.usage_always)
        if asked.has_several_answers:
            return Intake(text, refusal=NotRecorded("several_answers"))
    except Unreadable:
        return Intake(text, refusal=NotRecorded("malformed_request"))
    return Intake(asked.body, Passage(asked, request.headers, path, in_flight, started, upstream.loaded))


def _unread(request: web.BaseRequest, reason: Reason) -> Intake:
    body = request.content.iter_any() if request.body_exists else None
    return Intake(body, refusal=NotRecorded(reason))


def _reason_not_to_look(request: web.BaseRequest, engine: Engine) -> Reason | None:
    if is_probe(request.headers):
        return "probe"
    if engine == "driftguard":
        return "reports_itself"
    return "encoded" if "Content-Encoding" in request.headers else None


def target_of(request: web.BaseRequest) -> str:
    """Path and query unchanged, without the host that a request target may also contain (RFC 9112 §3.2.2)."""
    target = request.raw_path
    return target if target.startswith("/") else URL(target, encoded=True).raw_path_qs


async def read_up_to(
    content: aiohttp.StreamReader, most: int, share: Share
) -> tuple[bytes, Literal["too_large", "no_room"] | None]:
    """(the bytes that were read, the reason if that is not the whole body); in that case slightly more than
    `most` bytes, or than there is room for."""
    pieces = [content.read_nowait()] if content.is_eof() else []  # it usually arrived with the headers
    size = sum(map(len, pieces))
    has_room = share.take(size)
    while size <= most and has_room and not content.at_eof():
        pieces.append(await content.readany())
        size += len(pieces[-1])
        has_room = share.take(len(pieces[-1]))
    return b"".join(pieces), "too_large" if size > most else None if has_room else "no_room"


async def chained(held: list[bytes], rest: AsyncIterator[bytes], share: Share) -> AsyncIterator[bytes]:
    """Yields the held bytes, and gives their room back."""
    yield held.pop()
    share.give_back()
    async for chunk in rest:
        yield chunk
