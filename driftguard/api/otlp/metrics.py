"""Metrics of OTLP/HTTP (metrics, v1) as data points; docs/otlp.md lists the metrics that are used."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Final

import msgspec

from driftguard.adapters.otlp_points import Point, Temporality
from driftguard.api.otlp.attributes import Attribute, Resource
from driftguard.api.otlp.encoding import Attributes, Signal
from driftguard.sources.otlp_push import Export

_TEMPORALITY: Final[dict[int, Temporality]] = {1: "delta", 2: "cumulative"}
_NO_RECORDED_VALUE: Final = 1  # of the flags
_NUMBERS: Final = ("gauge", "sum")
_DISTRIBUTIONS: Final = ("histogram", "exponential_histogram", "summary")


def _exports(request: Any, plain: Attributes) -> list[Export]:
    return [
        Export(
            plain(group.resource.attributes),
            [
                point
                for scope in group.scope_metrics
                for metric in scope.metrics
                for point in _points(metric, plain)
            ],
        )
        for group in request.resource_metrics
        if group.scope_metrics  # skips empty ones, of which a small export may hold a million
    ]


def _count(request: _Request) -> int:
    scopes = [scope for group in request.resource_metrics for scope in group.scope_metrics]
    kinds = [
        data
        for scope in scopes
        for metric in scope.metrics
        if (kind := metric.kind()) and (data := getattr(metric, kind))
    ]
    items = [request.resource_metrics, scopes, *(scope.metrics for scope in scopes)]
    return sum(map(len, items)) + sum(len(data.data_points) for data in kinds)


def _points(metric: Any, plain: Attributes) -> Iterator[Point]:
    kind = metric.kind() if isinstance(metric, _Metric) else metric.WhichOneof("data")
    if kind is None:
        return
    data = getattr(metric, kind)
    temporality: Temporality = "none"
    if kind == "summary":
        temporality = "cumulative"
    elif kind != "gauge":
        temporality = _TEMPORALITY.get(data.aggregation_temporality, "unspecified")
    for point in data.data_points:
        yield Point(
            name=metric.name,
            labels=frozenset((key, str(value)) for key, value in plain(point.attributes).items()),
            parts=(("", _number(point)),) if kind in _NUMBERS else _sum_and_count(point),
            at_ns=int(point.time_unix_nano),
            start_ns=int(point.start_time_unix_nano),
            temporality=temporality,
            is_monotonic=kind in _DISTRIBUTIONS or (kind == "sum" and data.is_monotonic),
            is_gone=bool(point.flags & _NO_RECORDED_VALUE),
        )


def _number(point: Any) -> float:
    """NaN if the point has none: JavaScript writes NaN and Infinity as null in JSON."""
    if isinstance(point, _Point):
        kind = next((kind for kind in ("as_int", "as_double") if getattr(point, kind) is not None), None)
    else:
        kind = point.WhichOneof("value")
    return math.nan if kind is None else float(getattr(point, kind))


def _sum_and_count(point: Any) -> tuple[tuple[str, float], ...]:
    return ("_sum", float(point.sum or 0.0)), ("_count", float(point.count))


class _Point(msgspec.Struct, rename="camel", frozen=True, gc=False):
    """A number has as_int or as_double, a distribution sum and count."""

    attributes: tuple[Attribute, ...] = ()
    start_time_unix_nano: int | str = 0
    time_unix_nano: int | str = 0
    as_int: int | float | str | None = None
    as_double: float | str | None = None  # text: NaN, Infinity
    sum: float | str | None = None
    count: int | str = 0
    flags: int = 0


class _Data(msgspec.Struct, rename="camel", frozen=True, gc=False):
    data_points: tuple[_Point, ...] = ()
    aggregation_temporality: int = 0
    is_monotonic: bool = False


class _Metric(msgspec.Struct, rename="camel", frozen=True, gc=False):
    name: str = ""
    gauge: _Data | None = None
    sum: _Data | None = None
    histogram: _Data | None = None
    exponential_histogram: _Data | None = None
    summary: _Data | None = None

    def kind(self) -> str | None:
        return next((kind for kind in (*_NUMBERS, *_DISTRIBUTIONS) if getattr(self, kind) is not None), None)


class _ScopeMetrics(msgspec.Struct, frozen=True, gc=False):
    metrics: tuple[_Metric, ...] = ()


class _ResourceMetrics(msgspec.Struct, rename="camel", frozen=True, gc=False):
    resource: Resource = Resource()
    scope_metrics: tuple[_ScopeMetrics, ...] = ()


class _Request(msgspec.Struct, rename="camel", frozen=True, gc=False):
    resource_metrics: tuple[_ResourceMetrics, ...] = ()


def _classes() -> tuple[Any, Any]:
    from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
        ExportMetricsServiceRequest,
        ExportMetricsServiceResponse,
    )

    return ExportMetricsServiceRequest, ExportMetricsServiceResponse


METRICS: Final = Signal(
    variable="METRICS",
    request="ExportMetricsServiceRequest",
    classes=_classes,
    decode=msgspec.json.Decoder(_Request).decode,
    holds={1: {2: {2: {kind: {1: None} for kind in (5, 7, 9, 10, 11)}}}},  # the last are points
    count=_count,
    items=_exports,
    rejected="rejected_data_points",
)
