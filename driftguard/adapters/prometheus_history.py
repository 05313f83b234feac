"""The history of a serving engine's counters in a Prometheus: the answer of /api/v1/query_range.

    curl -G 'http://prometheus:9090/api/v1/query_range' -d 'start=...' -d 'end=...' -d 'step=30s' \
         --data-urlencode 'query={__name__=~"vllm:.*|process_start_time_seconds",job="vllm"}'

Every step of the query is taken as a scrape, and gives the windows of such a scrape. Servers are
distinguished by `instance`. A series that is missing at a step is taken as missing in that scrape.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Annotated, Final

import msgspec

from driftguard.adapters.adapter import Adapter
from driftguard.adapters.kinds import detect
from driftguard.adapters.reading import Labels, Reading
from driftguard.adapters.window import Identity, LeftOut, Window
from driftguard.records import UNREADABLE_JSON

NOTHING_FOUND: Final = "no counter of a serving engine in it; query its series by name, see docs/sources.md"
_OF_PROMETHEUS: Final = frozenset({"__name__", "instance", "job"})


class _Series(msgspec.Struct, frozen=True):
    metric: dict[str, str]
    values: list[tuple[float, str]]


class _Data(msgspec.Struct, frozen=True, rename="camel"):
    result_type: str
    result: list[_Series]


class _Answer(msgspec.Struct, frozen=True):
    status: str
    data: _Data | None = None
    error: Annotated[str, msgspec.Meta(max_length=1_000)] = ""


class NoHistory(ValueError):
    """not an answer of Prometheus' /api/v1/query_range: {detail}"""

    def __init__(self, detail: object) -> None:
        super().__init__(f"not an answer of Prometheus' /api/v1/query_range: {detail}")


def windows(text: bytes, known: Identity) -> Iterator[tuple[str, Window]]:
    """(instance, window), in the order of time for each instance. Raises NoHistory, Incomplete."""
    try:
        answer = msgspec.json.decode(text, type=_Answer)
    except UNREADABLE_JSON as error:
        raise NoHistory(error) from None
    if answer.data is None or answer.data.result_type != "matrix":
        detail = (
            answer.error
            or f"a matrix is needed, but this is {answer.data.result_type if answer.data else 'nothing'}"
        )
        raise NoHistory(detail)
    by_instance: dict[str, list[_Series]] = defaultdict(list)
    for series in answer.data.result:
        by_instance[series.metric.get("instance", "")].append(series)
    for instance, found in sorted(by_instance.items()):
        adapter = detect("\n".join(series.metric.get("__name__", "") for series in found))
        if adapter is not None:
            yield from ((instance, window) for window in _windows(adapter, found, known))


def _windows(adapter: Adapter, found: list[_Series], known: Identity) -> Iterator[Window]:
    try:
        before, *later = _readings(found)
    except (ValueError, OverflowError) as error:  # a value or a time that is none
        raise NoHistory(error) from None
    for after in later:
        try:
            windows = adapter.windows(before, after, known)
        except LeftOut:
            windows = ()
        if not any(window.goes_on for window in windows):
            yield from windows
            before = after.after(before)


def _readings(found: list[_Series]) -> list[Reading]:
    samples: dict[float, dict[str, dict[Labels, float]]] = defaultdict(lambda: defaultdict(dict))
    for series in found:
        labels = frozenset(item for item in series.metric.items() if item[0] not in _OF_PROMETHEUS)
        for at, text in series.values:
            if math.isfinite(value := float(text)):  # as of a scrape, which leaves NaN out
                samples[at][series.metric.get("__name__", "")][labels] = value
    return [Reading(datetime.fromtimestamp(at, UTC), dict(samples[at])) for at in sorted(samples)]
