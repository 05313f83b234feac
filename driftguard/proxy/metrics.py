"""Every Prometheus metric of the proxy. Labels are bounded: never a model, a segment or a user."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final, Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from driftguard.client import Counts
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
            "Requests by what became of them, and whether they were recorded, or why not.",
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

    def watch(self, in_flight: Callable[[], float], counts: Callable[[], Counts]) -> None:
        """Where to ask for what is not counted here, whenever the metrics are asked for."""
        self.in_flight.set_function(in_flight)
        self.registry.register(_Records(counts))

    def count(self, outcome: Outcome, reason: Reason | None) -> None:
        """`reason`: why the request is not recorded; None for one that is."""
        self._requests[outcome, reason or RECORDED].inc()

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)


class _Records(Collector):
    """What became of the records, by the client that sends them."""

    def __init__(self, counts: Callable[[], Counts]) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        counts = self._counts()
        records = CounterMetricFamily(
            "driftguard_proxy_records",
            "Records by what became of them: dropped are those that found no room, or no sidecar at the end.",
            labels=["outcome"],
        )
        for outcome in ("sent", "refused", "dropped"):
            records.add_metric([outcome], getattr(counts, outcome))
        yield records
        yield GaugeMetricFamily(
            "driftguard_proxy_records_queued", "Records waiting for the sidecar.", value=counts.waiting
        )
        yield CounterMetricFamily(
            "driftguard_proxy_send_failures",
            "Attempts to send records that the sidecar did not answer for.",
            value=counts.failed_attempts,
        )
