"""Removes members of a JSON object, or adds one, and leaves every other byte unchanged."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

import msgspec

from driftguard.records import UNREADABLE_JSON

_OPEN: Final = re.compile(rb"\s*\{\s*")
_NAME: Final = re.compile(rb'"(?:[^"\\]|\\.)*"\s*:\s*', re.DOTALL)
_COMMA: Final = re.compile(rb"\s*,\s*")
_CLOSE: Final = re.compile(rb"\s*\}\s*")
MOST_MEMBERS: Final = 1_000  # of one object: reading each takes some 10 µs, during which all traffic waits
_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class NotAnObject(ValueError):
    """The text is not one JSON object with distinct names, at most MOST_MEMBERS."""


@dataclass(frozen=True, slots=True)
class Member:
    """text[start:end] is the whole member, text[value_start:end] its value."""

    name: str
    start: int
    value_start: int
    end: int


def values_in(text: bytes) -> dict[str, msgspec.Raw]:
    """Of the outermost object, by name. Raises NotAnObject."""
    decode = _decode if text.count(b":") <= MOST_MEMBERS else _bounded_decode
    try:
        return decode(text)
    except UNREADABLE_JSON as error:
        raise NotAnObject(str(error)) from None


class _Name(str):
    """One that is counted where it is decoded."""

    __slots__ = ()


def _bounded_decode(text: bytes) -> dict[str, msgspec.Raw]:
    """Ends at the first member too many, instead of making objects of hundreds of thousands, which takes most
    of a second. Takes longer for few. Raises NotAnObject, and what `_decode` raises."""
    left = iter(range(MOST_MEMBERS))

    def count(_: type, name: str) -> _Name:
        if next(left, None) is None:
            raise NotAnObject(f"more than {MOST_MEMBERS} members")
        return _Name(name)

    return dict(msgspec.json.decode(text, type=dict[_Name, msgspec.Raw], dec_hook=count))


def members(text: bytes) -> list[Member]:
    """Of the outermost object. Raises NotAnObject."""
    values = values_in(text)
    opening = _OPEN.match(text)
    place = opening.end() if opening else 0
    found: list[Member] = []
    for name, value in values.items():
        if found:
            comma = _COMMA.match(text, place)
            place = comma.end() if comma else place
        named = _NAME.match(text, place)
        raw = bytes(value)
        if named is None or not text.startswith(raw, named.end()):
            raise NotAnObject("a name occurs twice")
        found.append(Member(name, place, named.end(), named.end() + len(raw)))
        place = found[-1].end
    if _CLOSE.fullmatch(text, place) is None:
        raise NotAnObject("a name occurs twice")
    return found


def without(text: bytes, names: Collection[str]) -> bytes:
    """Raises NotAnObject."""
    found = members(text)
    kept = [place for place, member in enumerate(found) if member.name not in names]
    if len(kept) == len(found):
        return text
    pieces = [text[: found[0].start]]
    for place in kept:
        # Each but the first is removed with the comma before it.
        start = found[place].start if place == kept[0] else found[place - 1].end
        pieces.append(text[start : found[place].end])
    return b"".join([*pieces, text[found[-1].end :]])


def with_member(text: bytes, name: str, value: bytes) -> bytes:
    """The member becomes the first; one of that name is replaced. Raises NotAnObject."""
    text = without(text, {name})
    opening = _OPEN.match(text)
    place = opening.end() if opening else 0
    comma = b"" if text[place : place + 1] == b"}" else b","
    return text[:place] + msgspec.json.encode(name) + b":" + value + comma + text[place:]


def with_last_member(text: bytes, name: str, source: bytes) -> bytes:
    """The member of that name of `source`, as it stands there, becomes the last; nothing is added where it is
    missing there (or the first), or known here. Raises NotAnObject."""
    theirs, ours = members(source), members(text)
    place = next((place for place, member in enumerate(theirs) if member.name == name), 0)
    if not (place and ours) or name in (member.name for member in ours):
        return text
    end = ours[-1].end
    return text[:end] + source[theirs[place - 1].end : theirs[place].end] + text[end:]


def within(text: bytes, name: str, names: Collection[str]) -> bytes:
    """Removes `names` from the object in member `name`; an object that becomes empty is removed too.

    Raises NotAnObject.
    """
    for member in members(text):
        if member.name == name and text[member.value_start : member.value_start + 1] == b"{":
            inner = without(text[member.value_start : member.end], names)
            if not members(inner):
                return without(text, {name})
            return text[: member.value_start] + inner + text[member.end :]
    return text
