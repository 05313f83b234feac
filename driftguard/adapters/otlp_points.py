"""Data points of OTLP metrics, and which of them an adapter can use.

The name of a monotonic sum may lack Prometheus' suffix `_total`: some collectors remove it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from driftguard.adapters.reading import MAX_POSITION, POSITION_LABELS, START_TIME, Labels, is_position
from driftguard.records import FUTURE_TOLERANCE

MAX_COUNT: Final = 2.0**53  # up to which a float is an exact integer
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)

Temporality = Literal["cumulative", "delta", "unspecified", "none"]  # none: a gauge
Series = tuple[str, Labels]


@dataclass(frozen=True, slots=True)
class Point:
    """One data point. `parts`: suffix of the metric's name -> value, as Prometheus would show it: a number
    has one without a suffix, a histogram _sum and _count. Times are nanoseconds since 1970; 0: unknown."""

    name: str
    labels: Labels
    parts: tuple[tuple[str, float], ...]
    at_ns: int
    start_ns: int = 0
    temporality: Temporality = "none"
    is_monotonic: bool = False
    is_gone: bool = False  # NO_RECORDED_VALUE: the collector no longer has a value

    @property
    def series(self) -> Iterator[tuple[Series, float]]:
        return (((self.name + suffix, self.labels), value) for suffix, value in self.parts)


def selected(point: Point, names: Collection[str]) -> Point | None:
    """The point under the name that an adapter uses for it; None if the adapter does not use this metric."""
    for name in (point.name, f"{point.name}_total" if point.is_monotonic else point.name):
        if name == START_TIME or any(name + suffix in names for suffix, _ in point.parts):
            return replace(point, name=name)
    return None


def refusal(point: Point, now: datetime, oldest: datetime) -> str | None:
    """Why a point cannot be used, with its name; None if it can."""
    if point.temporality == "unspecified":
        return f"{point.name}: aggregation temporality is unspecified"
    first = _nanoseconds(oldest)
    if point.at_ns < first or is_in_the_future(point.at_ns, now):
        return f"{point.name}: time_unix_nano {point.at_ns} is in the future, or older than records are kept"
    if point.temporality == "delta" and point.start_ns and not first <= point.start_ns <= point.at_ns:
        return f"{point.name}: start_time_unix_nano {point.start_ns} is later, or older than records are kept"
    if point.is_gone:
        return None
    for suffix, value in point.parts:
        if not math.isfinite(value) or abs(value) > MAX_COUNT or (point.is_monotonic and value < 0):
            return f"{point.name}{suffix}: {value!r} is not a count"
    for label, text in point.labels:
        if label in POSITION_LABELS and not is_position(text):
            return f"{point.name}: {label} {text[:20]!r} is not a position from 0 to {MAX_POSITION}"
    return None


def is_in_the_future(at_ns: int, now: datetime) -> bool:
    return at_ns > _nanoseconds(now + FUTURE_TOLERANCE)


def _nanoseconds(at: datetime) -> int:
    return (at - _EPOCH) // timedelta(microseconds=1) * 1_000


def moment(nanoseconds: int) -> datetime:
    """Since 1970. Raises OverflowError: after the year 9999."""
    return _EPOCH + timedelta(microseconds=nanoseconds // 1_000)
