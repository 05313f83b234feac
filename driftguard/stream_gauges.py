"""Gauges of a stream: its speed, and with which K it would be faster."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import Gauge

from driftguard import stream_cost
from driftguard.cost import Cost
from driftguard.metrics import Metrics
from driftguard.status import StreamStatus
from driftguard.store.streams import StreamRow

Labels = tuple[str, ...]


def show(metrics: Metrics, found: Sequence[StreamStatus]) -> None:
    costs = [
        (labels_of(item.stream), item.cost)
        for item in found
        if item.in_service
        and item.cost
        and not stream_cost.is_outdated(item.stream.last_seen_at, item.cost_measured_at)
    ]
    gauges: dict[Gauge, dict[Labels, float | None]] = {
        metrics.stream_speed: {
            **{(*labels_of(item.stream), "now"): item.tokens_per_second_now for item in found},
            **{(*labels_of(item.stream), "before"): item.tokens_per_second_baseline for item in found},
        },
        metrics.speculation_speedup: {
            (*labels, bound): value for labels, cost in costs for bound, value in _speedup(cost).items()
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


def _speedup(cost: Cost) -> dict[str, float]:
    """Bound -> tokens per second with speculation over those without; empty where that was not measured."""
    gains = [choice.gain for choice in cost.choices if choice.num_speculative_tokens == 0]
    return {
        bound: 1.0 / (1.0 + gain_of_none)
        for gain in gains
        for bound, gain_of_none in (("estimate", gain.value), ("low", gain.high), ("high", gain.low))
    }


def labels_of(stream: StreamRow) -> Labels:
    return stream.server, stream.target, stream.draft_version, stream.method
