"""Spans of OTLP/HTTP (traces, v1) and the record that one of them holds; docs/otlp.md lists attributes."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from math import isfinite
from typing import Any, Final
from uuid import NAMESPACE_URL, uuid5

import msgspec

from driftguard.adapters.otlp_identity import PREFIX, TARGET
from driftguard.adapters.otlp_points import moment
from driftguard.api.otlp.attributes import Attribute, Resource
from driftguard.api.otlp.encoding import Attributes, Signal
from driftguard.records import DEFAULT_SEGMENT

MARK: Final = "driftguard.drafted_tokens"  # spans without it are ignored

# Field of the record -> attributes of the span or its resource; the first that is present is used.
_SOURCES: Final[dict[str, tuple[str, ...]]] = {
    "server": ("driftguard.server", "service.name"),
    "target": TARGET,
    "draft": ("driftguard.draft",),
    "draft_version": ("driftguard.draft_version",),
    "method": ("driftguard.method",),
    "segment": ("driftguard.segment",),
    "session": ("gen_ai.conversation.id",),
    "steps": ("driftguard.steps",),
    "drafted": (MARK,),
    "accepted": ("driftguard.accepted_tokens",),
    "emitted": ("driftguard.emitted_tokens",),
    "drafted_per_position": ("driftguard.drafted_per_position",),
    "accepted_per_position": ("driftguard.accepted_per_position",),
    "num_speculative_tokens": ("driftguard.num_speculative_tokens",),
    "acceptance_rule": ("driftguard.acceptance_rule",),
    "verification": ("driftguard.verification",),
    "temperature": ("gen_ai.request.temperature",),
    "prompt_tokens": ("gen_ai.usage.input_tokens",),
    "cached_tokens": ("gen_ai.usage.cache_read.input_tokens",),
    "output_tokens": ("gen_ai.usage.output_tokens",),
    "time_to_first_token_seconds": ("driftguard.time_to_first_token_seconds",),
    "time_per_output_token_seconds": ("driftguard.time_per_output_token_seconds",),
    "concurrency": ("driftguard.concurrency",),
    "waiting_requests": ("driftguard.waiting_requests",),
}
_SHARED: Final = tuple(name for names in _SOURCES.values() for name in names)
_KNOWN: Final = {name for name in _SHARED if name.startswith(PREFIX)}
_OUT_OF_RANGE: Final = msgspec.Raw(b"1e999")  # which the check of the record refuses by the field's name


@dataclass(frozen=True, slots=True)
class Span:
    """One span with the attributes of its resource; its own take precedence. Ids are hexadecimal, times
    nanoseconds."""

    trace_id: str
    span_id: str
    started_ns: int
    ended_ns: int
    attributes: dict[str, Any]

    @property
    def is_ours(self) -> bool:
        return MARK in self.attributes

    @property
    def is_of_generation(self) -> bool:
        return any(name.startswith((PREFIX, "gen_ai.", "llm.")) for name in self.attributes)


def record_line(span: Span) -> bytes:
    """The span as a line of POST /api/v1/records, not yet checked.

    The same span is the same record, however often it is exported.
    """
    values: dict[str, Any] = {
        "kind": "request",
        "fidelity": "request",
        "started_at": _time(span.started_ns),
        "ended_at": _time(span.ended_ns),
        "segment": DEFAULT_SEGMENT,
    }
    # Ids of zeros are invalid (OTLP), and would make all such spans one record.
    if span.trace_id.strip("0") and span.span_id.strip("0"):
        ids = f"otlp:{span.trace_id.lower()}:{span.span_id.lower()}"
        values["record_id"] = uuid5(NAMESPACE_URL, ids)
    for field, names in _SOURCES.items():
        found = next((span.attributes[name] for name in names if name in span.attributes), None)
        if found is not None:
            values[field] = _checkable(found)
    unknown = {name: 0 for name in span.attributes if name.startswith(PREFIX) and name not in _KNOWN}
    return msgspec.json.encode(values | unknown)


def _checkable(value: Any) -> Any:
    """JSON has no NaN and no Infinity: the encoder would write null, and the span be stored without it."""
    if isinstance(value, list):
        return [_checkable(item) for item in value]
    return _OUT_OF_RANGE if isinstance(value, float) and not isfinite(value) else value


def _time(nanoseconds: int) -> str | datetime:
    try:
        return moment(nanoseconds)
    except OverflowError:
        return str(nanoseconds)  # not a valid time, so that the check refuses it by name


def _spans(request: Any, plain: Attributes) -> list[Span]:
    found = []
    for group in request.resource_spans:
        if not group.scope_spans:
            continue
        shared = _shared(plain(group.resource.attributes))
        found += [
            Span(
                _hexadecimal(span.trace_id),
                _hexadecimal(span.span_id),
                int(span.start_time_unix_nano),
                int(span.end_time_unix_nano),
                shared | plain(span.attributes),
            )
            for scope in group.scope_spans
            for span in scope.spans
        ]
    return found


def _count(request: _Request) -> int:
    scopes = [scope for group in request.resource_spans for scope in group.scope_spans]
    return len(request.resource_spans) + len(scopes) + sum(len(scope.spans) for scope in scopes)


def _shared(attributes: dict[str, Any]) -> dict[str, Any]:
    """The attributes of a resource that are copied to its spans: those of a record's fields, and one that is
    refused by name."""
    unknown = sorted(name for name in attributes if name.startswith(PREFIX) and name not in _KNOWN)
    return {name: attributes[name] for name in (*_SHARED, *unknown[:1]) if name in attributes}


def _hexadecimal(span_id: str | bytes) -> str:
    return span_id if isinstance(span_id, str) else span_id.hex()


class _Span(msgspec.Struct, rename="camel", frozen=True, gc=False):
    trace_id: str = ""
    span_id: str = ""
    start_time_unix_nano: int | str = 0
    end_time_unix_nano: int | str = 0
    attributes: tuple[Attribute, ...] = ()


class _ScopeSpans(msgspec.Struct, frozen=True, gc=False):
    spans: tuple[_Span, ...] = ()


class _ResourceSpans(msgspec.Struct, rename="camel", frozen=True, gc=False):
    resource: Resource = Resource()
    scope_spans: tuple[_ScopeSpans, ...] = ()


class _Request(msgspec.Struct, rename="camel", frozen=True, gc=False):
    resource_spans: tuple[_ResourceSpans, ...] = ()


def _classes() -> tuple[Any, Any]:
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
        ExportTraceServiceRequest,
        ExportTraceServiceResponse,
    )

    return ExportTraceServiceRequest, ExportTraceServiceResponse


TRACES: Final = Signal(
    variable="TRACES",
    request="ExportTraceServiceRequest",
    classes=_classes,
    decode=msgspec.json.Decoder(_Request).decode,
    holds={1: {2: {2: None}}},
    count=_count,
    items=_spans,
    rejected="rejected_spans",
)
