"""Records that are received, and input that did not become a record."""

from __future__ import annotations

from prometheus_client import Histogram

from driftguard.metrics.labels import ARRIVALS
from driftguard.metrics.series import Series


class IngestMetrics:
    def __init__(self, series: Series) -> None:
        self.records = series.counter(
            "driftguard_ingest_records",
            "Records that arrived over HTTP, by outcome.",
            "outcome",
        )
        for outcome in ARRIVALS:
            self.records.labels(outcome)  # the first that are refused are an increase
        self.otlp_ignored_spans = series.counter(
            "driftguard_otlp_ignored_spans",
            "Spans that arrived over OTLP without counts of speculative decoding.",
        )
        self.otlp_ignored_points = series.counter(
            "driftguard_otlp_ignored_points",
            "Data points that arrived over OTLP and belong to metrics that are not used.",
        )
        self.otlp_rejected_points = series.counter(
            "driftguard_otlp_rejected_points",
            "Data points that arrived over OTLP and were rejected; the answer says why.",
        )
        self.stream_limit_refused_records = series.counter(
            "driftguard_stream_limit_refused_records",
            "Records refused, from any source, because their stream would exceed ingest.max_streams.",
        )
        self.queued_records = series.gauge(
            "driftguard_ingest_queued_records", "Records waiting for the database."
        )
        self.oldest_unacknowledged = series.gauge(
            "driftguard_ingest_oldest_unacknowledged_seconds",
            "How long the oldest waiting batch has waited for its commit; 0 if none waits.",
        )
        self.commit_seconds = Histogram(
            "driftguard_ingest_commit_seconds",
            "Time from arrival of a batch to its commit.",
            buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
            registry=series.registry,
        )
        self.captures = series.counter("driftguard_captures", "Captured requests by outcome.", "outcome")
