"""Exports of many points: how often series are looked at grows as the points do, not as their square."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta

import pytest

from driftguard.adapters import otlp_readings
from driftguard.adapters.opentelemetry import METRICS, OPENTELEMETRY, TOKEN_TYPE
from driftguard.adapters.otlp_points import Point
from driftguard.adapters.otlp_readings import Readings, TooManySeries
from driftguard.adapters.reading import MAX_VALUES, Reading
from driftguard.adapters.vllm import VLLM
from driftguard.adapters.window import Identity, Incomplete
from tests.adapters.test_otlp_readings import BEGAN, SECOND

FEW = 40
MOST_LOOKS_PER_SERIES = (
    60  # twenty or so are enough; with each series looking at all others it is FEW times that
)


class Counted(frozenset[tuple[str, str]]):
    """Labels that count how often they are looked into."""

    looks = 0

    def __iter__(self) -> Iterator[tuple[str, str]]:
        Counted.looks += 1
        return super().__iter__()


class CountedTime(int):
    looks = 0

    def __lt__(self, other: int) -> bool:
        CountedTime.looks += 1
        return int(self) < other

    def __gt__(self, other: int) -> bool:
        CountedTime.looks += 1
        return int(self) > other


def looks(kind: type[Counted] | type[CountedTime], work: Callable[[int], object], size: int) -> int:
    kind.looks = 0
    work(size)
    return kind.looks


def compare_streams(count: int) -> None:
    """A reading of `count` streams, each the only one of its target, with the one before."""
    at = datetime(2026, 11, 1, tzinfo=UTC)
    names = (*METRICS.values(), f"{METRICS['output_tokens']}_sum")

    def reading(value: float, at: datetime) -> Reading:
        labels = [
            Counted({("driftguard.target", f"t{number}"), (TOKEN_TYPE, "output")}) for number in range(count)
        ]
        return Reading(at, {name: dict.fromkeys(labels, value) for name in names if "position" not in name})

    before, after = reading(10, at), reading(20, at + timedelta(seconds=30))
    windows = OPENTELEMETRY.windows(before, after, Identity("server"))
    assert [window.drafted for window in windows] == [10] * count
    assert [window.generated for window in windows] == [10] * count


def put_together(count: int) -> None:
    """Two readings of `count` series, none of which is in both."""
    readings = Readings()
    for number in range(2):
        at = CountedTime(BEGAN + 30 * number * SECOND)
        places = [frozenset({("place", f"{number} {place}")}) for place in range(count)]
        readings.take([Point("steps", place, (("", 1.0),), at, 1, "cumulative", True) for place in places])


@pytest.mark.parametrize(
    ("kind", "work"), [(Counted, compare_streams), (CountedTime, put_together)], ids=["streams", "readings"]
)
def test_the_looks_at_a_series_do_not_depend_on_how_many_there_are(
    kind: type[Counted] | type[CountedTime], work: Callable[[int], object]
) -> None:
    few, many = looks(kind, work, FEW), looks(kind, work, 10 * FEW)
    assert 0 < few <= MOST_LOOKS_PER_SERIES * FEW
    assert many <= 11 * few


def test_a_few_points_cannot_make_endless_copies_of_old_deltas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(otlp_readings, "MAX_SAMPLES", 1_000)
    readings = Readings()

    def delta(place: int, seconds: int) -> Point:
        at = BEGAN + seconds * SECOND
        return Point("steps", frozenset({("place", str(place))}), (("", 1.0),), at, 0, "delta", True)

    readings.take([delta(place, 0) for place in range(100)])
    assert len(readings.take([delta(0, 10 * number) for number in range(1, 8)])) == 7
    with pytest.raises(TooManySeries, match="more than 1000 samples"):
        readings.take([delta(0, 1_000 + 10 * number) for number in range(20)])


def test_a_server_of_more_models_than_can_be_told_apart_is_named() -> None:
    at = datetime(2026, 11, 1, tzinfo=UTC)
    labels = [frozenset({("model_name", f"m{number}")}) for number in range(MAX_VALUES + 1)]
    reading = Reading(at, {VLLM.drafted: dict.fromkeys(labels, 1.0)})
    with pytest.raises(Incomplete, match="more than 1000 values of model_name"):
        VLLM.windows(reading, reading, Identity("server"))
