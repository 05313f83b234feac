"""Every metric of sidecar, engine and proxy as a table: `make metrics` writes it to docs/metrics.md."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from driftguard_engine.server import metrics
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from driftguard.metrics import Metrics
from driftguard.proxy.metrics import ProxyMetrics

INTRODUCTION: Final = """\
# Metrics

Served at `/metrics` of the sidecar and of the built-in engine, and at `/driftguard/metrics` on the proxy's
admin port; `make metrics` writes this file from them.
Ratios are 0 to 1, times are seconds, timestamps are seconds since 1970. Besides these, all serve the
`process_*` metrics of the Prometheus client, and the sidecar `python_info`.
"""


@dataclass(frozen=True, slots=True, order=True)
class Row:
    name: str
    type: str
    labels: tuple[str, ...]
    help: str

    def __str__(self) -> str:
        labels = ", ".join(f"`{label}`" for label in self.labels)
        return f"| `{self.name}` | {self.type} | {labels} | {self.help} |"


def document() -> str:
    return "\n".join(
        [
            INTRODUCTION,
            *_table("Sidecar", rows(Metrics().registry)),
            "",
            *_table("Engine", rows(_engine_registry())),
            "",
            *_table("Proxy", rows(_proxy_registry())),
            "",
        ]
    )


def _table(title: str, found: Iterable[Row]) -> Iterator[str]:
    yield from (f"## {title}", "", "| metric | type | labels | meaning |", "| --- | --- | --- | --- |")
    yield from map(str, sorted(found))


def rows(registry: CollectorRegistry) -> Iterator[Row]:
    """In no order; without what the client exports by itself."""
    for collector in registry._collector_to_names:
        for family in collector.collect():
            if family.name.startswith("driftguard"):
                suffix = {"counter": "_total", "info": "_info"}.get(family.type, "")
                kind = "gauge" if family.type == "info" else family.type
                yield Row(family.name + suffix, kind, _labels(collector, family), family.documentation)


def _labels(collector: Collector, family: Metric) -> tuple[str, ...]:
    """As declared; where they are only made when read, those of what was read."""
    if isinstance(collector, MetricWrapperBase):
        return tuple(collector._labelnames)
    return tuple(dict.fromkeys(name for sample in family.samples for name in sample.labels if name != "le"))


class _Zero(float):
    """Stands for an engine and its telemetry whose every state is 0: no model has to be loaded."""

    def __getattr__(self, name: str) -> _Zero:
        return self

    def __getitem__(self, name: object) -> _Zero:
        return self

    def __iter__(self) -> Iterator[_Zero]:
        yield self


def _engine_registry() -> CollectorRegistry:
    idle: Any = _Zero()
    return metrics.Metrics(idle, idle)._registry


def _proxy_registry() -> CollectorRegistry:
    return ProxyMetrics().registry


if __name__ == "__main__":
    print(document(), end="")
