"""Attributes of OTLP messages, in JSON and in protobuf, as plain values."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec


class _Value(msgspec.Struct, rename="camel", frozen=True, gc=False):
    string_value: str | None = None
    bool_value: bool | None = None
    # 64-bit integers are text in protobuf's JSON; numbers are allowed too, which JavaScript writes as 1e21.
    int_value: int | float | str | None = None
    double_value: float | str | None = None  # NaN and Infinity are text
    array_value: _Values | None = None

    def plain(self) -> Any:
        if self.int_value is not None:
            return _number(self.int_value, int)
        if self.double_value is not None:
            return _number(self.double_value, float)
        if self.array_value is not None:
            return [value.plain() for value in self.array_value.values]
        return self.string_value if self.string_value is not None else self.bool_value


def _number(given: float | str, kind: type[int] | type[float]) -> float | str:
    """A text that is none stays text, and 2.5 is no integer: it is refused by name where one is needed, and
    the other items of the export do not fail with it."""
    if isinstance(given, float) and not given.is_integer():
        return given
    try:
        return kind(given)
    except ValueError:
        return str(given)


class _Values(msgspec.Struct, frozen=True, gc=False):
    values: tuple[_Value, ...] = ()


class Attribute(msgspec.Struct, frozen=True, gc=False):
    key: str = ""  # exporters may leave out what has its default
    value: _Value = _Value()


class Resource(msgspec.Struct, frozen=True, gc=False):
    attributes: tuple[Attribute, ...] = ()


def json_attributes(attributes: Iterable[Attribute]) -> dict[str, Any]:
    return {item.key: item.value.plain() for item in attributes}


def plain_attributes(attributes: Any) -> dict[str, Any]:
    """Of protobuf."""
    return {item.key: _plain_value(item.value) for item in attributes}


def _plain_value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [_plain_value(item) for item in value.array_value.values]
    return (
        getattr(value, kind) if kind in ("string_value", "bool_value", "int_value", "double_value") else None
    )
