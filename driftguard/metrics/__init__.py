"""Every Prometheus metric of the sidecar. Labels are bounded: never a request, a user or a session.

One `Metrics` per process (and per test), passed to the code that counts. Only counters are exported, no
ratios: `rate(accepted) / rate(drafted)` is a ratio of sums.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from prometheus_client import Gauge, disable_created_metrics
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.platform_collector import PlatformCollector
from prometheus_client.process_collector import ProcessCollector

from driftguard.metrics.database import DatabaseMetrics
from driftguard.metrics.fold import FoldMetrics
from driftguard.metrics.incidents import IncidentMetrics
from driftguard.metrics.ingest import IngestMetrics
from driftguard.metrics.loops import LoopMetrics
from driftguard.metrics.notifications import NotificationMetrics
from driftguard.metrics.retraining import RetrainingMetrics
from driftguard.metrics.series import Series
from driftguard.metrics.sources import SourceMetrics
from driftguard.metrics.streams import StreamMetrics
from driftguard.metrics.traffic import TrafficMetrics

CONTENT_TYPE: Final = CONTENT_TYPE_LATEST

disable_created_metrics()  # type: ignore[no-untyped-call]


class Metrics:
    """The metrics by subject, and their registry.

    `max_streams`: number of streams with series of their own; the others are counted together.
    """

    def __init__(self, max_streams: int = 1_000) -> None:
        self.max_streams = max_streams
        self._series = Series()
        self.registry = self._series.registry
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        self.ingest = IngestMetrics(self._series)
        self.database = DatabaseMetrics(self._series)
        self.fold = FoldMetrics(self._series)
        self.streams = StreamMetrics(self._series)
        self.incidents = IncidentMetrics(self._series)
        self.loops = LoopMetrics(self._series)
        self.notifications = NotificationMetrics(self._series)
        self.retraining = RetrainingMetrics(self._series)
        self.sources = SourceMetrics(self._series)
        self.traffic = TrafficMetrics(self._series, max_streams, self.streams.left_out)

    def replace(self, gauge: Gauge, values: Mapping[tuple[str, ...], float]) -> None:
        """Shows these series (label values -> value) of a gauge, and no others. Only this ever sets it."""
        self._series.replace(gauge, values)

    def exposition(self) -> bytes:
        """The text that Prometheus scrapes."""
        return generate_latest(self.registry)
