"""Servers whose metrics are scraped or pushed."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime

from driftguard.adapters.condition import CONDITIONS, DOWN, Condition
from driftguard.metrics.labels import SOURCE
from driftguard.metrics.series import Series


class SourceMetrics:
    def __init__(self, series: Series) -> None:
        self._series = series
        self._kinds: dict[str, str] = {}
        self.up = series.gauge(
            "driftguard_source_up",
            "1 if the newest scrape of this server, or export of its metrics, could be read; 0 too if its "
            "exports have stopped.",
            *SOURCE,
        )
        self.condition = series.gauge(
            "driftguard_source_condition",
            "1 for the condition of this server at its newest scrape or export; no series for the others.",
            *SOURCE,
            "condition",
        )
        self.last_success = series.gauge(
            "driftguard_source_last_success_timestamp_seconds",
            "When the metrics of this server were last scraped or pushed, and could be read.",
            *SOURCE,
        )
        self.scrapes = series.counter(
            "driftguard_source_scrapes",
            "Scrapes of this server, or exports of its metrics, by outcome: a condition of "
            "driftguard_source_condition.",
            *SOURCE,
            "condition",
        )
        self.scraping_active = series.gauge(
            "driftguard_scraping_active",
            "1 if this sidecar scrapes the server, 0 if another sidecar on its database does or the database "
            "is away.",
            "source",
        )

    def observe(self, source: str, kind: str, condition: Condition, at: datetime) -> None:
        """After a scrape or an export, at `at`. `source`: the server's name as its records carry it."""
        self.scrapes.labels(source, kind, condition).inc()
        self.show(source, kind, condition, None if condition in DOWN else at)

    def show(self, source: str, kind: str, condition: Condition, answered_at: datetime | None) -> None:
        """Series of a `kind` that was detected before are removed."""
        self.up.labels(source, kind).set(0 if condition in DOWN else 1)
        for name in CONDITIONS:
            if name == condition:
                self.condition.labels(source, kind, name).set(1)
            else:
                self.condition.remove_by_labels({"source": source, "kind": kind, "condition": name})
        if answered_at is not None:
            self.last_success.labels(source, kind).set(answered_at.timestamp())
        if self._kinds.get(source, kind) != kind:
            self.forget(source)
        self._kinds[source] = kind

    def set_scraping(
        self, sources: Collection[str], here: Collection[str], elsewhere: Collection[str]
    ) -> None:
        """Which of the sources this sidecar scrapes. Series of sources that another sidecar scrapes are
        removed."""
        self._series.replace(self.scraping_active, {(source,): float(source in here) for source in sources})
        for source in elsewhere:
            if source in self._kinds:
                self.forget(source)

    def forget(self, source: str) -> None:
        former = {"source": source, "kind": self._kinds.pop(source, "")}
        for gauge in (self.up, self.condition, self.last_success):
            gauge.remove_by_labels(former)
