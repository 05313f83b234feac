"""Exports whose texts hold half a character.

A text of JavaScript is a sequence of UTF-16 units, and its SDK cuts long attributes between any two of them.
Half of a character is no Unicode: parsers refuse all of an export that holds one, in JSON and, from older
exporters, in protobuf. It becomes U+FFFD here, as newer exporters for protobuf write it.
"""

from __future__ import annotations

import re
from typing import Any, Final

from driftguard.api.otlp.bounds import FIXED32, FIXED64, MESSAGE, VARINT, Cut, Nested, nested_fields, varint
from driftguard.api.request_body import Body

# Other escapes, so that no backslash that is escaped begins one; both halves, or one.
_ESCAPE: Final = re.compile(
    rb"(?:\\[^u])+|\\u(?:[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}|([dD][89a-fA-F][0-9a-fA-F]{2})|)"
)
_HALF: Final = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")  # UTF-8 as if it were a character
_NOT_UTF_8: Final = re.compile("[\udc80-\udcff]")
_REPLACEMENT: Final = "\ufffd".encode()  # as long as a half
_TEXT: Final = object()


def whole_in_json(body: Body) -> bytes:
    """The body with U+FFFD for each half."""
    return _ESCAPE.sub(lambda found: rb"\ufffd" if found[1] else found[0], body)


def whole_in_protobuf(body: Body, descriptor: Any) -> bytes:
    """As whole_in_json, of a message of this type; with a question mark for each byte that is no UTF-8
    otherwise. Unchanged if the bytes are not a message."""
    whole = bytearray(body)
    try:
        _mend(whole, 0, len(whole), nested_fields(descriptor, _TEXT))
    except (Cut, IndexError, RecursionError):
        return bytes(body)
    return bytes(whole)


def _mend(body: bytearray, place: int, end: int, fields: Nested) -> None:
    """Raises Cut, IndexError, RecursionError."""
    while place < end:
        tag, place = varint(body, place)
        kind, inner = tag & 7, fields.get(tag >> 3)
        if kind == MESSAGE:
            length, place = varint(body, place)
            if inner is _TEXT:
                body[place : place + length] = _whole(bytes(body[place : place + length]))
            elif inner is not None:
                _mend(body, place, place + length, inner)
            place += length
        elif kind == VARINT:
            _, place = varint(body, place)
        elif kind in (FIXED64, FIXED32):
            place += 8 if kind == FIXED64 else 4
        else:
            raise Cut
    if place > end:
        raise Cut


def _whole(text: bytes) -> bytes:
    """Of the same length."""
    if text.isascii():
        return text
    shown = _HALF.sub(_REPLACEMENT, text).decode("utf-8", "surrogateescape")
    return _NOT_UTF_8.sub("?", shown).encode()
