"""What a collector's Prometheus receiver makes of a scrape: OTLP sums, gauges and histograms."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from google.protobuf.json_format import MessageToDict
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric, ResourceMetrics
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

CUMULATIVE = 2  # AggregationTemporality


def exported(text: str, at_ns: int, *, start_ns: int = 0, **resource: str) -> ExportMetricsServiceRequest:
    """A scrape as one request. `resource`: its attributes, with __ for the dots."""
    request = ExportMetricsServiceRequest()
    group = request.resource_metrics.add()
    group.resource.attributes.extend(attributes((k.replace("__", "."), v) for k, v in resource.items()))
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    sums = {(sample.name, str(sample.labels)): sample.value for sample in samples}
    into = group.scope_metrics.add().metrics
    for sample in samples:
        if sample.name.endswith("_sum"):
            continue
        if sample.name.endswith("_count"):
            total = sums[sample.name.removesuffix("_count") + "_sum", str(sample.labels)]
            histogram(into.add(), sample, total)
        else:
            number(into.add(), sample)
    stamp(group, at_ns, start_ns)
    return request


def attributes(pairs: Iterable[tuple[str, str]]) -> list[KeyValue]:
    return [KeyValue(key=key, value=AnyValue(string_value=value)) for key, value in pairs]


def number(metric: Metric, sample: Sample) -> None:
    metric.name = sample.name
    data = metric.sum if sample.name.endswith("_total") else metric.gauge
    if sample.name.endswith("_total"):
        metric.sum.aggregation_temporality = CUMULATIVE  # type: ignore[assignment]
        metric.sum.is_monotonic = True
    data.data_points.add(as_double=sample.value, attributes=attributes(sample.labels.items()))


def histogram(metric: Metric, sample: Sample, total: float) -> None:
    metric.name = sample.name.removesuffix("_count")
    metric.histogram.aggregation_temporality = CUMULATIVE  # type: ignore[assignment]
    metric.histogram.data_points.add(
        sum=total, count=int(sample.value), attributes=attributes(sample.labels.items())
    )


def stamp(group: ResourceMetrics, at_ns: int, start_ns: int) -> None:
    for metric in group.scope_metrics[0].metrics:
        data: Any = getattr(metric, metric.WhichOneof("data") or "gauge")
        for point in data.data_points:
            point.time_unix_nano = at_ns
            point.start_time_unix_nano = start_ns


def as_json(request: ExportMetricsServiceRequest) -> bytes:
    return json.dumps(MessageToDict(request, use_integers_for_enums=True)).encode()
