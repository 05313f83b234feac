"""Every Prometheus metric of the proxy. Labels are bounded: never a model, a segment or a user."""

from __future__ import annotations

import asyncio
import os
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from driftguard.client import Counts
from driftguard.proxy import counts as at
from driftguard.proxy.counts import ADDED_BUCKETS, OUTCOMES, RECORDED, RECORDS, Outcome, SharedCounts
from driftguard.proxy.recording import Reason

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST
UPDATE_SECONDS: Final = 0.5
_PLACES: Final = {
    (outcome, record): at.REQUESTS + place
    for place, (outcome, record) in enumerate((o, r) for o in OUTCOMES for r in RECORDS)
}


class ProxyMetrics:
    """The counts of one worker, and the metrics of all workers."""

    def __init__(self, shared: SharedCounts | None = None, worker: int = 0) -> None:
        self.registry = CollectorRegistry()
        self._shared = shared or SharedCounts()
        self._row = self._shared.rows[worker]
        self._row[at.PROCESS_ID] = os.getpid()
        self._before = [self._row[place] for place in _OF_RECORDS]  # counts of the previous worker here
        self._records: Callable[[], Counts] = Counts
        self.registry.register(_Totals(self._shared))
        self.registry.register(_Processes(self._shared))

    def watch(self, records: Callable[[], Counts]) -> None:
        """Sets the source of this worker's record counts."""
        self._records = records

    def begin(self) -> int:
        """Counts a new request. Returns the requests in flight in all workers, this one included."""
        self._row[at.IN_FLIGHT] += 1
        return int(self._shared.total(at.IN_FLIGHT))

    def end(self) -> None:
        """Counts the end of a request."""
        self._row[at.IN_FLIGHT] -= 1

    def count(self, outcome: Outcome, reason: Reason | None) -> None:
        """`reason`: why the request is not recorded; None for one that is."""
        self._row[_PLACES[outcome, reason or RECORDED]] += 1

    def added(self, seconds: float) -> None:
        """Counts the time added to one answered request."""
        self._row[at.ADDED_SECONDS] += seconds
        self._row[at.ADDED + bisect_left(ADDED_BUCKETS, seconds)] += 1

    def made_room(self) -> None:
        """A connection was closed to make room."""
        self._row[at.MADE_ROOM] += 1

    def update(self) -> None:
        """Shares the counts of this worker's records with all workers."""
        now = self._records()
        self._row[at.QUEUED] = now.waiting
        for place, before, name in zip(_OF_RECORDS, self._before, _OF_RECORDS.values(), strict=True):
            self._row[place] = before + getattr(now, name)

    async def keep_updated(self) -> None:
        """Updates regularly, for scrapes that other workers answer."""
        while True:
            self.update()
            await asyncio.sleep(UPDATE_SECONDS)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        self.update()
        return generate_latest(self.registry)


_OF_RECORDS: Final = {
    at.SENT: "sent",
    at.REFUSED: "refused",
    at.DROPPED: "dropped",
    at.SEND_FAILURES: "failed_attempts",
}


class _Totals(Collector):
    """Over all workers."""

    def __init__(self, shared: SharedCounts) -> None:
        self._total = shared.total

    def collect(self) -> Iterator[Metric]:
        yield self._requests()
        yield GaugeMetricFamily(
            "driftguard_proxy_requests_in_flight", "Requests in flight.", value=self._total(at.IN_FLIGHT)
        )
        yield self._added()
        records = CounterMetricFamily(
            "driftguard_proxy_records",
            "Records by outcome: dropped are those for which there was no room, or no sidecar at the end, "
            "or that waited in a worker that was killed.",
            labels=["outcome"],
        )
        for outcome, place in (("sent", at.SENT), ("refused", at.REFUSED), ("dropped", at.DROPPED)):
            records.add_metric([outcome], self._total(place))
        yield records
        yield GaugeMetricFamily(
            "driftguard_proxy_records_queued",
            "Records waiting for the sidecar.",
            value=self._total(at.QUEUED),
        )
        yield CounterMetricFamily(
            "driftguard_proxy_send_failures",
            "Attempts to send records that the sidecar did not acknowledge.",
            value=self._total(at.SEND_FAILURES),
        )
        yield CounterMetricFamily(
            "driftguard_proxy_connections_closed_for_room",
            "Connections closed because there were more than proxy.max_connections.",
            value=self._total(at.MADE_ROOM),
        )
        yield CounterMetricFamily(
            "driftguard_proxy_worker_restarts",
            "Workers started to replace one that ended unexpectedly.",
            value=self._total(at.RESTARTS),
        )

    def _requests(self) -> Metric:
        requests = CounterMetricFamily(
            "driftguard_proxy_requests",
            "Requests by outcome, and whether they were recorded, or why not.",
            labels=["outcome", "record"],
        )
        for labels, place in _PLACES.items():
            requests.add_metric(labels, self._total(place))
        return requests

    def _added(self) -> Metric:
        bounds = (*map(floatToGoString, ADDED_BUCKETS), "+Inf")
        counts = accumulate(self._total(at.ADDED + place) for place in range(len(bounds)))
        added = HistogramMetricFamily(
            "driftguard_proxy_added_seconds",
            "Time that the proxy itself spent before a request went upstream and before its answer began.",
        )
        added.add_metric([], list(zip(bounds, counts, strict=True)), self._total(at.ADDED_SECONDS))
        return added


class _Processes(Collector):
    """The client library's process_* metrics, with a label for the worker."""

    def __init__(self, shared: SharedCounts) -> None:
        self._rows = shared.rows

    def collect(self) -> Iterable[Metric]:
        families: dict[str, Metric] = {}
        for worker, row in enumerate(self._rows):
            for family in _process_metrics(int(row[at.PROCESS_ID])):
                merged = families.setdefault(
                    family.name, Metric(family.name, family.documentation, family.type)
                )
                for sample in family.samples:
                    merged.add_sample(sample.name, {"worker": str(worker)}, sample.value)
        return families.values()


def _process_metrics(process_id: int) -> Iterable[Metric]:
    """No metrics if the process has ended."""
    return ProcessCollector(pid=lambda: process_id, registry=CollectorRegistry()).collect()
