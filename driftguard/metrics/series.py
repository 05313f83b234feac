"""The registry, and the operations on all of its metrics."""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Counter, Gauge


class Series:
    """Makes metrics and sets many series of one at once."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._shown: dict[Gauge, dict[tuple[str, ...], float]] = {}

    def counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def gauge(self, name: str, text: str, *labels: str) -> Gauge:
        return Gauge(name, text, labels, registry=self.registry)

    def replace(self, gauge: Gauge, values: Mapping[tuple[str, ...], float]) -> None:
        """Shows exactly these series (label values -> value) of a gauge that only this method sets. A series
        that stays is never removed for a moment: a scrape meanwhile must not miss it."""
        self.set(gauge, values)
        shown = self._shown[gauge]
        for labels in shown.keys() - values.keys():
            gauge.remove(*labels)
            del shown[labels]

    def set(self, gauge: Gauge, values: Mapping[tuple[str, ...], float]) -> None:
        """Sets only series that changed: most have not, and setting one takes the library 3 us."""
        shown = self._shown.setdefault(gauge, {})
        for labels, value in values.items():
            if shown.get(labels) != value:
                gauge.labels(*labels).set(value)
                shown[labels] = value
