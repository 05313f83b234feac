"""Reads the segment and the session of a request."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from driftguard.proxy.asking import Fields, decoded
from driftguard.records import PROBE_SEGMENT

SEGMENT_HEADER: Final = "X-DriftGuard-Segment"
MAX_LENGTH: Final = 256


class BadLabel(ValueError):
    """The request names a segment or a session that no record can hold."""


def is_probe(headers: Mapping[str, str]) -> bool:
    """Whether it is a canary probe, which its sender records."""
    return headers.get(SEGMENT_HEADER) == PROBE_SEGMENT


def label(source: str, headers: Mapping[str, str], path: str, fields: Fields) -> str | None:
    """`source` as in the settings; None if the request has none, or an empty one, as of clients and gateways
    that always send the header. Raises BadLabel, Unreadable."""
    kind, _, name = source.partition(":")
    if kind == "header":
        value: object = headers.get(name)
    elif kind == "path":
        value = path
    else:
        value = _member(fields, name if kind == "json" else "model")
    if value is None or value == "":
        return None
    text = value if isinstance(value, str) else str(value)
    if not 1 <= len(text) <= MAX_LENGTH or "\x00" in text or not text.isprintable():
        raise BadLabel(f"{source}: a label has 1 to {MAX_LENGTH} printable characters")
    return text


def _member(fields: Fields, dotted: str) -> str | int | None:
    first, _, rest = dotted.partition(".")
    if first not in fields:
        return None
    value = decoded(fields[first])
    for name in rest.split(".") if rest else ():
        value = value.get(name) if isinstance(value, dict) else None
    if value is None:
        return None
    if isinstance(value, str) or (isinstance(value, int) and not isinstance(value, bool)):
        return value
    raise BadLabel(f"json:{dotted}: neither a text nor a whole number")
