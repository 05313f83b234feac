"""Reading a request body within a bound, plain or gzip."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import msgspec
from fastapi import Request
from fastapi.concurrency import run_in_threadpool

from driftguard.api.problems import MalformedBody, UnsupportedEncoding
from driftguard.errors import TooLarge

_GZIP = 16 + zlib.MAX_WBITS
_PART_BYTES = 65_536
_MAX_MEMBERS = 1_000
_JSON_LINES = ("application/x-ndjson", "application/jsonl", "application/x-jsonlines")
_items = msgspec.json.Decoder(list[msgspec.Raw]).decode


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """The body, decompressed. Raises TooLarge as soon as the bound is passed, MalformedBody,
    UnsupportedEncoding."""
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("identity", "gzip"):
        raise UnsupportedEncoding(f"Content-Encoding {encoding!r} is not understood; send gzip or none")
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise _too_large(max_bytes)
    parts = bytearray()
    async for part in request.stream():
        parts += part
        if len(parts) > max_bytes:
            raise _too_large(max_bytes)
    if encoding == "gzip":
        return await run_in_threadpool(_decompress, memoryview(parts), max_bytes)
    return bytes(parts)


def split_items(body: bytes, content_type: str) -> Iterator[tuple[int, bytes]]:
    """(number, text) of each JSON value in JSON Lines or in a JSON array, numbered from 1.

    A JSON Lines content type decides; otherwise the first byte does. Blank lines count but are skipped.
    Raises MalformedBody for an empty body and for an array that is not valid JSON.
    """
    start = body.lstrip()[:1]
    if not start:
        raise MalformedBody("the body is empty; send JSON Lines or a JSON array")
    if start != b"[" or content_type.split(";", maxsplit=1)[0].strip().lower() in _JSON_LINES:
        for number, line in enumerate(body.split(b"\n"), start=1):
            if line.strip():
                yield number, line
        return
    try:
        items = _items(body)
    except (msgspec.DecodeError, RecursionError) as error:
        raise MalformedBody(f"the body is not a valid JSON array ({error})") from None
    for number, item in enumerate(items, start=1):
        yield number, bytes(item)


def is_json(text: bytes) -> bool:
    try:
        msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return False
    return True


def _decompress(data: memoryview, max_bytes: int) -> bytes:
    """In parts: what follows a member is copied with each member that ends."""
    whole = bytearray()
    members, member = 1, zlib.decompressobj(_GZIP)
    try:
        for start in range(0, len(data), _PART_BYTES):
            part: memoryview | bytes = data[start : start + _PART_BYTES]
            while part:  # a gzip body may hold several members, one after the other
                if member.eof:
                    members, member = members + 1, zlib.decompressobj(_GZIP)
                if members > _MAX_MEMBERS:
                    raise TooLarge(f"the gzip body has more than {_MAX_MEMBERS} members; send one")
                whole += member.decompress(part, max_bytes + 1 - len(whole))
                if len(whole) > max_bytes:
                    raise _too_large(max_bytes)
                part = member.unused_data
    except zlib.error as error:
        raise MalformedBody(f"the body is not valid gzip ({error})") from None
    if data and not member.eof:
        raise MalformedBody("the gzip body is cut short")
    return bytes(whole)


def _too_large(max_bytes: int) -> TooLarge:
    return TooLarge(f"the body is larger than {max_bytes} bytes; send smaller batches", max_bytes=max_bytes)
