"""Which exports of a resource make a reading, in what order they come and in how many parts."""

from __future__ import annotations

from driftguard.adapters.otlp_points import Point
from driftguard.adapters.otlp_readings import PATIENCE, Readings
from driftguard.adapters.reading import START_TIME

SECOND = 10**9
BEGAN = 1_795_000_000 * SECOND


def counter(name: str, value: float, seconds: float, *, start_seconds: float | None = None) -> Point:
    at = BEGAN + int(seconds * SECOND)
    start = 0 if start_seconds is None else BEGAN + int(start_seconds * SECOND)
    return Point(name, frozenset(), (("", value),), at, start, "cumulative", is_monotonic=True)


def both(steps: float, accepted: float, seconds: float) -> list[Point]:
    return [counter("steps", steps, seconds), counter("accepted", accepted, seconds)]


def told(readings: Readings, *points: Point) -> list[tuple[dict[str, float], bool]]:
    """(name -> value, whether a window ends here) of each reading."""
    return [
        ({name: next(iter(of.values())) for name, of in taken.reading.samples.items()}, not taken.left_out)
        for taken in readings.take(points)
    ]


def test_points_of_a_second_are_one_reading_and_several_readings_may_come_at_once() -> None:
    readings = Readings()
    late = [counter("steps", 1, 0), counter("accepted", 2, 0.4), *both(3, 4, 15)]
    assert told(readings, *reversed(late)) == [
        ({"steps": 1, "accepted": 2}, True),
        ({"steps": 3, "accepted": 4}, True),
    ]


def test_what_came_before_and_what_comes_too_late_changes_nothing() -> None:
    readings = Readings()
    told(readings, *both(1, 1, 0))
    assert told(readings, counter("steps", 5, 15)) == []  # its other half is on its way
    told(readings, *both(9, 9, 30))
    assert told(readings, counter("accepted", 5, 15)) == []
    assert told(readings, *both(9, 9, 30)) == []
    assert told(readings, *both(10, 10, 45)) == [({"steps": 10, "accepted": 10}, True)]


def test_a_reading_without_a_counter_is_passed_over_until_that_is_taken_to_be_gone() -> None:
    readings = Readings()
    told(readings, *both(1, 1, 0))
    found = [told(readings, counter("steps", number, 15 * number)) for number in range(1, PATIENCE + 1)]
    assert found == [[]] * PATIENCE
    without = told(readings, counter("steps", 100, 15 * PATIENCE + 15))
    assert without == [({"steps": PATIENCE}, False), ({"steps": 100}, True)]


def test_a_counter_that_began_before_the_last_reading_makes_no_window() -> None:
    readings = Readings()
    told(readings, counter("steps", 1, 0))
    assert told(readings, *both(2, 5_000, 15)) == [({"steps": 2, "accepted": 5_000}, False)]
    fresh = counter("drafted", 3, 30, start_seconds=20)
    assert told(readings, *both(3, 5_001, 30), fresh)[-1][1]


def test_sums_of_deltas_are_not_taken_for_counts_since_a_restart() -> None:
    """They go on over it, and a window would hold all that was ever counted."""
    readings = Readings()
    for number, started in enumerate((1_000.0, 1_000.0, 2_000.0)):
        at, before = (BEGAN + (15 * each) * SECOND for each in (number + 1, number))
        delta = Point("steps", frozenset(), (("", 4.0),), at, before, "delta", is_monotonic=True)
        start = Point(START_TIME, frozenset(), (("", started),), at)
        taken = readings.take([delta, start])
    last = taken[-1].reading
    assert (last.samples["steps"][frozenset()], last.started_at) == (12.0, None)


def test_after_a_restart_the_other_parts_of_an_export_are_waited_for_as_well() -> None:
    readings = Readings()
    told(readings, *both(10, 10, 0))
    assert told(readings, counter("steps", 2, 15)) == []
    assert told(readings, counter("accepted", 1, 15)) == [({"steps": 2, "accepted": 1}, True)]


def test_a_counter_that_is_missing_after_a_restart_is_waited_for_until_the_next_reading() -> None:
    readings = Readings()
    told(readings, *both(10, 10, 0))
    assert told(readings, counter("steps", 2, 15)) == []
    next_ones = told(readings, counter("steps", 3, 30))
    assert next_ones == [({"steps": 2}, True), ({"steps": 3}, True)]
