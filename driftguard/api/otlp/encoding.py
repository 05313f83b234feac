"""Requests and answers of OTLP/HTTP in their two encodings, for each signal (traces, metrics).

JSON is read here; the protobuf encoding needs the classes of the `otlp` extra. Both use the same names, so
that one function reads both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, Generic, Literal, TypeVar

import msgspec

from driftguard.api.otlp.attributes import json_attributes, plain_attributes
from driftguard.api.otlp.bounds import (
    Nested,
    json_fields,
    nested_fields,
    protobuf_fields,
    refuse_many,
    refuse_many_items,
)
from driftguard.api.otlp.half_characters import whole_in_json, whole_in_protobuf
from driftguard.api.problems import MalformedBody, MissingExtra
from driftguard.api.request_body import Body
from driftguard.settings import IngestSettings

PROTOBUF: Final = "application/x-protobuf"
JSON: Final = "application/json"

Attributes = Callable[[Any], dict[str, Any]]  # of a message, in its encoding -> name: value
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True)
class Signal(Generic[Item]):
    """`variable`: its name in the variables of exporters. `request`: the name of its message; `classes`: of
    the request and the answer, in protobuf; `decode`: decodes the request from JSON. `items`: the items of a
    request; `holds`: the message fields down to those; `count`: the number of such messages in JSON.
    `rejected`: the field of a partial success with the number of rejected items."""

    variable: Literal["TRACES", "METRICS"]
    request: str
    classes: Callable[[], tuple[Any, Any]]
    decode: Callable[[Body], Any]
    holds: Nested
    count: Callable[[Any], int]
    items: Callable[[Any, Attributes], list[Item]]
    rejected: str

    def read(self, media_type: str, body: Body, limits: IngestSettings) -> list[Item]:
        """`media_type`: JSON or PROTOBUF. Raises MalformedBody, MissingExtra, TooLarge."""
        read = self._read_json if media_type == JSON else self._read_protobuf
        return read(body, limits)

    def answer(self, media_type: str, rejected: int, message: str) -> bytes:
        """`message`: why items were rejected; with 0 rejected it is a warning."""
        if media_type == JSON:
            partial = {_camel(self.rejected): str(rejected), "errorMessage": message}
            return msgspec.json.encode({"partialSuccess": partial} if message else {})
        answer = self.classes()[1]()
        if message:
            setattr(answer.partial_success, self.rejected, rejected)
            answer.partial_success.error_message = message
        return bytes(answer.SerializeToString())

    def _read_json(self, body: Body, limits: IngestSettings) -> list[Item]:
        refuse_many(body, json_fields(body, limits.max_otlp_fields), limits.max_otlp_fields)
        try:
            request = self._decoded(body)
            refuse_many_items(self.count(request), limits.max_otlp_items)
            return self.items(request, json_attributes)
        except (ValueError, OverflowError, RecursionError) as error:  # msgspec's errors are ValueErrors
            raise MalformedBody(f"the body is not an {self.request} in JSON ({error})") from None

    def _decoded(self, body: Body) -> Any:
        """Raises ValueError, OverflowError, RecursionError."""
        try:
            return self.decode(body)
        except msgspec.ValidationError:
            raise
        except msgspec.DecodeError:
            if (whole := whole_in_json(body)) == body:
                raise
            return self.decode(whole)

    def _read_protobuf(self, body: Body, limits: IngestSettings) -> list[Item]:
        try:
            from google.protobuf.message import DecodeError

            message, _ = self.classes()
        except ImportError:
            raise MissingExtra(
                "protobuf needs opentelemetry-proto; pip install 'driftguard-llm[otlp]' beside the sidecar, "
                f"or export JSON (OTEL_EXPORTER_OTLP_{self.variable}_PROTOCOL=http/json)"
            ) from None
        nested = nested_fields(message.DESCRIPTOR)
        fields, items = limits.max_otlp_fields, limits.max_otlp_items
        refuse_many(body, protobuf_fields(body, nested, fields), fields)
        refuse_many_items(protobuf_fields(body, self.holds, items, only_nested=True), items)
        try:
            request = _parsed(message, body, DecodeError)
        except DecodeError as error:
            raise MalformedBody(f"the body is not an {self.request} ({error})") from None
        return self.items(request, plain_attributes)


def _parsed(message: Any, body: Body, error: type[Exception]) -> Any:
    """Raises `error`: the body is no such message."""
    try:
        return message.FromString(body)
    except error:
        if (whole := whole_in_protobuf(body, message.DESCRIPTOR)) == body:
            raise
        return message.FromString(whole)


def _camel(field: str) -> str:
    """The field's name in protobuf's JSON."""
    first, *others = field.split("_")
    return first + "".join(map(str.capitalize, others))
