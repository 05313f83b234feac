"""Counts the fields of an OTLP export before any object is made of them: an empty message takes two bytes on
the wire and a hundred in memory, and gzip compresses a million of them to almost nothing."""

from __future__ import annotations

from functools import cache
from typing import Any, Final

import numpy as np

from driftguard.api.request_body import Body
from driftguard.errors import TooLarge
from driftguard_http.json_text import outside_strings

VARINT, FIXED64, MESSAGE, FIXED32 = 0, 1, 2, 5  # wire types; groups (3, 4) have no bytes of their own
_JSON_MARKS: Final = (b",", b"{", b"[")

# Number of a field that holds messages -> its own Nested, None if nothing in them is counted.
Nested = dict[int, Any]
_OTHER: Final = object()  # a field that holds no messages


class Cut(Exception):
    """The bytes are not a message; the parser reports that."""


def refuse_many(body: Body, fields: int, most: int) -> None:
    """`fields`: their number; above `most` it may be too low. Raises TooLarge."""
    if fields > most:
        raise TooLarge(
            f"the export holds more than {most} fields ({len(body)} bytes); send smaller batches, or raise "
            "ingest.max_otlp_fields",
            max_fields=most,
        )


def refuse_many_items(items: int, most: int) -> None:
    """As refuse_many."""
    if items > most:
        raise TooLarge(
            f"the export holds more than {most} spans, data points, metrics, scopes and resources; send "
            "smaller batches, or raise ingest.max_otlp_items",
            max_items=most,
        )


def json_fields(body: Body, most: int) -> int:
    """Members, elements and containers at every depth. Punctuation inside strings is only excluded if it
    could change the result."""
    marks = sum(map(body.count, _JSON_MARKS))
    if marks <= most:
        return marks
    found = np.frombuffer(bytes(body), np.uint8)[outside_strings(body)]
    return sum(int(np.count_nonzero(found == ord(mark))) for mark in _JSON_MARKS)


def protobuf_fields(body: Body, nested: Nested, most: int, *, only_nested: bool = False) -> int:
    """Fields at every depth on the wire, counted until they are more than `most`; 0 if there are too few
    bytes for more, or if they are not a message. `only_nested`: only fields that hold messages."""
    if len(body) <= 2 * most:  # a field has a tag and at least a byte
        return 0
    try:
        return _count(body, nested, most, only_nested)
    except (Cut, IndexError):
        return 0


@cache
def nested_fields(descriptor: Any, of_text: object = None) -> Nested:
    """The nested fields of a protobuf message type; types may contain themselves. With `of_text` its fields
    that are text too, each with that in place of fields."""
    known: dict[str, Nested] = {}

    def of(kind: Any) -> Nested:
        if kind.full_name not in known:
            found = known[kind.full_name] = Nested()
            for field in kind.fields:
                if field.message_type:
                    found[field.number] = of(field.message_type)
                elif of_text is not None and field.type == field.TYPE_STRING:
                    found[field.number] = of_text
        return known[kind.full_name]

    return of(descriptor)


def _count(body: Body, nested: Nested, most: int, only_nested: bool) -> int:
    """Raises Cut, IndexError."""
    count, place, end = 0, 0, len(body)
    around: list[tuple[int, Nested]] = []  # end and fields of the messages around this one
    while count <= most:
        while place >= end:
            if place > end:
                raise Cut
            if not around:
                return count
            end, nested = around.pop()
        tag, place = varint(body, place)
        kind, inner = tag & 7, nested.get(tag >> 3, _OTHER)
        count += inner is not _OTHER or not only_nested
        if kind == MESSAGE:
            length, place = varint(body, place)
            if inner is None or inner is _OTHER:
                place += length
            else:
                around.append((end, nested))
                end, nested = place + length, inner
        elif kind == VARINT:
            _, place = varint(body, place)
        elif kind in (FIXED64, FIXED32):
            place += 8 if kind == FIXED64 else 4
    return count


def varint(body: Body, place: int) -> tuple[int, int]:
    """(value, place after it). Raises Cut, IndexError."""
    value = body[place]
    if value < 0x80:
        return value, place + 1
    value &= 0x7F
    for shift in range(7, 70, 7):
        place += 1
        part = body[place]
        value |= (part & 0x7F) << shift
        if part < 0x80:
            return value, place + 1
    raise Cut
