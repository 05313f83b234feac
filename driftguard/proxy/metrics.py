"""Every Prometheus metric of the proxy. Labels are bounded: never a model, a segment or a user."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.process_collector import ProcessCollector

from driftguard.proxy.recording import REASONS, Reason

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
RECORDED: Final = "recorded"
Outcome = Literal["answered", "client_gone", "unreachable", "timeout", "broken_off", "refused"]
OUTCOMES: Final[tuple[Outcome, ...]] = (
    "answered",  # whatever the status
    "client_gone",
    "unreachable",
    "timeout",
    "broken_off",  # the upstream ended the connection before the end of its answer
    "refused",  # what this proxy does not pass on: WebSocket, CONNECT
)

disable_created_metrics()  # type: ignore[no-untyped-call]


class ProxyMetrics:
    """The metrics and their registry."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        requests = Counter(
            "driftguard_proxy_requests",
            "Requests by what became of them, and whether or why not they were recorded.",
            ["outcome", "record"],
            registry=self.registry,
        )
        self._requests = {
            (outcome, record): requests.labels(outcome, record)
            for outcome in OUTCOMES
            for record in (RECORDED, *REASONS)
        }
        self.in_flight = Gauge(
            "driftguard_proxy_requests_in_flight", "Requests under way.", registry=self.registry
        )
        self.added_seconds = Histogram(
            "driftguard_proxy_added_seconds",
            "Time that the proxy itself spent before a request went upstream and before its answer began.",
            buckets=(0.0001, 0.00025, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.025, 0.1, 1),
            registry=self.registry,
        )
        records = Counter(
            "driftguard_proxy_records",
            "Records by what became of them.",
            ["outcome"],
            registry=self.registry,
        )
        self.records_sent = records.labels("sent")
        self.records_refused = records.labels("refused")  # by the sidecar
        self.records_dropped = records.labels("dropped")  # for want of room, or at the end
        self.records_queued = Gauge(
            "driftguard_proxy_records_queued", "Records waiting for the sidecar.", registry=self.registry
        )
        self.send_failures = Counter(
            "driftguard_proxy_send_failures",
            "Attempts to send records that the sidecar did not answer for.",
            registry=self.registry,
        )

    def watch(self, in_flight: Callable[[], float], queued: Callable[[], float]) -> None:
        """Where the gauges come from, when they are asked for."""
        self.in_flight.set_function(in_flight)
        self.records_queued.set_function(queued)

    def count(self, outcome: Outcome, reason: Reason | None) -> None:
        """`reason`: why the request is not recorded; None for one that is."""
        self._requests[outcome, reason or RECORDED].inc()

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)
