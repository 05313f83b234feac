"""Reading a request body within a bound, plain or gzip, and taking its items one by one.

A body takes several times its size in memory while it is processed: all requests share a limit for that.
"""

from __future__ import annotations

import asyncio
import re
import traceback
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Final

import msgspec
import numpy as np
from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from driftguard.api.problems import MalformedBody, UnsupportedEncoding
from driftguard.api.room import WaitingRoom
from driftguard.errors import TooLarge
from driftguard.records import UNREADABLE_JSON
from driftguard_http import Refusal
from driftguard_http.guard import CLOSE
from driftguard_http.json_text import outside_strings

_GZIP = 16 + zlib.MAX_WBITS
_PART_BYTES = 65_536
_UNPACKED_BYTES = 1_000_000  # at once
_MAX_MEMBERS = 1_000
UNSHARED_BYTES: Final = 64_000  # of a body, read even if there is no room
COMING_BYTES: Final = 12_000_000
OF_SMALL_BYTES: Final = 16_000_000
OF_LARGE_BYTES: Final = 48_000_000
LARGE_BODY_SECONDS: Final = 30.0  # for which an arriving body may hold room
_JSON_LINES = ("application/x-ndjson", "application/jsonl", "application/x-jsonlines")
_BLANK: Final = re.compile(rb"\s*")
_check = msgspec.json.Decoder(msgspec.Raw).decode  # parses all of it without making objects

Body = bytearray | bytes


class Bodies:
    """Memory for arriving bodies and the objects made of them; small bodies never wait for large ones."""

    def __init__(self) -> None:
        self._coming = WaitingRoom(COMING_BYTES)
        self._small, self._large = WaitingRoom(OF_SMALL_BYTES), WaitingRoom(OF_LARGE_BYTES)

    @asynccontextmanager
    async def read(self, request: Request, *, max_bytes: int, growth: int) -> AsyncIterator[Body]:
        """The body, unpacked. `growth`: bytes of memory that one byte of it takes at most while it is
        processed. Raises TooLarge as soon as the bound is passed, Busy, MalformedBody, UnsupportedEncoding,
        Refusal.
        """
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in ("identity", "gzip"):
            raise UnsupportedEncoding(f"Content-Encoding {encoding!r} is not supported; send gzip or none")
        declared = request.headers.get("content-length", "")
        size = int(declared) if declared.isdecimal() else max_bytes
        if declared and size > max_bytes:
            raise _too_large(max_bytes)
        parts, stream = bytearray(), request.stream()
        await _receive(parts, stream, UNSHARED_BYTES, max_bytes)
        async with self._coming.taken(size if len(parts) > UNSHARED_BYTES else 0):
            try:
                async with asyncio.timeout(LARGE_BODY_SECONDS):
                    await _receive(parts, stream, max_bytes, max_bytes)
            except TimeoutError:
                raise Refusal(408, "the body arrived too slowly", headers=CLOSE) from None
            is_packed = encoding == "gzip"
            size = await run_in_threadpool(_unpacked_bytes, parts, max_bytes) if is_packed else len(parts)
            worked_on = self._large if size > UNSHARED_BYTES else self._small
            async with worked_on.taken(size * growth):
                body = await run_in_threadpool(_unpacked, parts) if is_packed else parts
                try:
                    yield body
                except Exception as error:
                    traceback.clear_frames(error.__traceback__)  # whose frames hold objects made of the body
                    raise
                finally:
                    parts.clear()  # frees it even if it is still referenced
                    body.clear()


async def _receive(parts: bytearray, stream: AsyncIterator[bytes], until: int, max_bytes: int) -> None:
    """Reads until there are more than `until` bytes, or the body ends. Raises TooLarge, MalformedBody."""
    while len(parts) <= until:
        try:
            part = await anext(stream, None)
        except ClientDisconnect:
            raise MalformedBody("the client closed the connection before its body had arrived") from None
        if part is None:
            return
        parts += part
    if len(parts) > max_bytes:
        raise _too_large(max_bytes)


def split_items(body: Body, content_type: str) -> Iterator[tuple[int, Body]]:
    """(number, text) of each JSON value in JSON Lines or in a JSON array, numbered from 1.

    A JSON Lines content type decides; otherwise the first byte does. Blank lines count but are skipped.
    Raises MalformedBody for an empty body and for an array that is not valid JSON.
    """
    blank = _BLANK.match(body)
    start = blank.end() if blank else 0
    if start == len(body):
        raise MalformedBody("the body is empty; send JSON Lines or a JSON array")
    is_lines = content_type.split(";", maxsplit=1)[0].strip().lower() in _JSON_LINES
    items = _lines(body) if is_lines or body[start : start + 1] != b"[" else _array(body, start)
    for number, item in enumerate(items, start=1):
        if item.strip():
            yield number, item


def _lines(body: Body) -> Iterator[Body]:
    start = 0
    while start <= len(body):
        end = body.find(b"\n", start)
        end = len(body) if end < 0 else end
        yield body[start:end]
        start = end + 1


def _array(body: Body, start: int) -> Iterator[Body]:
    """The items of the array that begins there. Raises MalformedBody."""
    try:
        _check(body)
    except UNREADABLE_JSON as error:
        raise MalformedBody(f"the body is not a valid JSON array ({error})") from None
    outside = outside_strings(body)
    depth, begin = 0, start + 1
    for place in range(start, len(body), _PART_BYTES):  # in parts, which bounds the memory
        part = np.frombuffer(bytes(body[place : place + _PART_BYTES]), np.uint8)
        part = part * outside[place : place + _PART_BYTES]
        closes = (part == ord("]")) | (part == ord("}"))
        opens = (part == ord("[")) | (part == ord("{"))
        depths = depth + np.cumsum(opens.astype(np.int8) - closes, dtype=np.int64)
        depth = int(depths[-1])
        ends = np.flatnonzero(((part == ord(",")) & (depths == 1)) | (closes & (depths == 0)))
        for end in (place + ends).tolist():
            yield body[begin:end]
            begin = end + 1


def is_json(text: Body) -> bool:
    try:
        _check(text)
    except UNREADABLE_JSON:
        return False
    return True


def _unpacked_bytes(packed: Body, max_bytes: int) -> int:
    """The size after decompression. Raises TooLarge, MalformedBody."""
    size = 0
    for part in _gunzip(packed):
        size += len(part)
        if size > max_bytes:
            raise _too_large(max_bytes)
    return size


def _unpacked(packed: Body) -> bytearray:
    whole = bytearray()
    for part in _gunzip(packed):
        whole += part
    return whole


def _gunzip(packed: Body) -> Iterator[bytes]:
    """Yields parts, because the rest is copied at the end of each member. Raises TooLarge, MalformedBody."""
    members, member = 1, zlib.decompressobj(_GZIP)
    try:
        for start in range(0, len(packed), _PART_BYTES):
            part = bytes(packed[start : start + _PART_BYTES])
            while part:  # a gzip body may hold several members, one after the other
                if member.eof:
                    members, member = members + 1, zlib.decompressobj(_GZIP)
                if members > _MAX_MEMBERS:
                    raise TooLarge(f"the gzip body has more than {_MAX_MEMBERS} members; send one")
                yield member.decompress(part, _UNPACKED_BYTES)
                while not member.eof and (
                    unpacked := member.decompress(member.unconsumed_tail, _UNPACKED_BYTES)
                ):
                    yield unpacked
                part = member.unused_data
    except zlib.error as error:
        raise MalformedBody(f"the body is not valid gzip ({error})") from None
    if packed and not member.eof:
        raise MalformedBody("the gzip body is truncated")


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the body is larger than {max_bytes} bytes; send smaller batches", max_bytes=max_bytes)
