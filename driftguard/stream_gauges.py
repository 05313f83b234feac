"""Gauges of a stream: its speed, and with which K it would be faster."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Gauge

from driftguard import stream_cost
from driftguard.metrics import Metrics
from driftguard.status import StreamStatus


def show(metrics: Metrics, found: Sequence[StreamStatus]) -> None:
    costs = [
        (_labels(item), item.cost)
        for item in found
        if item.in_service and item.cost and not stream_cost.is_outdated(item.stream, item.cost_measured_at)
    ]
    gauges: dict[Gauge, dict[tuple[str, ...], float | None]] = {
        metrics.stream_speed: {
            **{(*_labels(item), "now"): item.tokens_per_second_now for item in found},
            **{(*_labels(item), "before"): item.tokens_per_second_baseline for item in found},
        },
        metrics.stream_k: {labels: cost.num_speculative_tokens for labels, cost in costs},
        metrics.stream_best_k: {labels: cost.best for labels, cost in costs},
        metrics.stream_break_even: {
            labels: cost.break_even_acceptance.value if cost.break_even_acceptance else None
            for labels, cost in costs
        },
    }
    for gauge, values in gauges.items():
        metrics.replace(gauge, {labels: value for labels, value in values.items() if value is not None})


def _labels(item: StreamStatus) -> tuple[str, ...]:
    stream = item.stream
    return stream.server, stream.target, stream.draft_version, stream.method
