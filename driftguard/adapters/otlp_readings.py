"""Combines the exports of one OTLP resource into readings, as a scrape of the server would give them.

Points of about the same time are one reading, in whichever requests they arrive: a collector may split a
scrape, and may send several scrapes at once. Only readings with the same counters are compared, because a
reading with some counters missing would look like a change of acceptance:

- a counter is missing: the reading waits for it until the next reading begins. Then it is skipped, and the
  next window is longer; after PATIENCE such readings, or a restart, the counter is assumed to have ended.
- a counter is new, but began to count before the previous reading: its increase since then is unknown. The
  next window begins here.

Points that have arrived before have no effect, so that an export may be sent again. Delta points are summed,
and are never missing: deltas of zero are usually not sent.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

from driftguard.adapters.otlp_points import Point, Series, moment
from driftguard.adapters.reading import SAME_START_SECONDS, START_TIME, Labels, Reading

TOGETHER_NS: Final = 1_000_000_000  # points of one reading: some SDKs read the clock for each instrument
PATIENCE: Final = 3
MAX_SERIES: Final = 20_000
MAX_SAMPLES: Final = 500_000  # each reading holds all earlier deltas: few points could make many samples


class TooManySeries(ValueError):
    """more than {MAX_SERIES} series of one resource, more than there is room for, or more than {MAX_SAMPLES}
    samples in the readings of an export"""


@dataclass(frozen=True, slots=True)
class Taken:
    """A reading. `place`: its number; a later reading with the same number replaces it, because more points
    arrived. `left_out`: why no window ends here; empty if one does."""

    reading: Reading
    place: int
    left_out: str = ""


@dataclass(frozen=True, slots=True)
class _Value:
    value: float
    at_ns: int
    start_ns: int = 0
    is_counter: bool = False  # a cumulative one
    told_ns: int = 0  # its start as the point has it, known or not


@dataclass(slots=True)
class Readings:
    """The state of one resource."""

    _open: dict[Series, _Value] = field(default_factory=dict)  # the reading that is not complete yet
    _place: int = 0
    _is_told: bool = True  # whether all of it was returned
    _last: dict[Series, _Value] = field(default_factory=dict)  # the last returned reading
    _sums: dict[Series, _Value] = field(default_factory=dict)  # of deltas, since the first one
    _passed_over: int = 0  # readings in a row
    # When a collector found counters: it says from then on that they began then, also of those whose points
    # of that time were lost.
    _found: set[int] = field(default_factory=set)
    _began_ns: int = 0  # the first time of the open reading
    newest_ns: int = 0  # of all points so far
    _most: int = MAX_SERIES

    @property
    def series(self) -> int:
        """The number of remembered series."""
        return len(self._open) + len(self._sums)

    def take(self, points: Sequence[Point], room: int = MAX_SERIES) -> list[Taken]:
        """The readings that these points complete, oldest first. `room`: how many more series may be
        remembered. Raises TooManySeries."""
        self._most = min(MAX_SERIES, self.series + room)
        taken = self._beginning(points)
        samples = 0
        for point in sorted(points, key=lambda point: point.at_ns):
            for series, value in point.series:
                if self._is_known(series, point):
                    continue
                if self._open and (series in self._open or point.at_ns - self._began_ns > TOGETHER_NS):
                    samples += len(self._open) + len(self._sums)
                    if samples > MAX_SAMPLES:
                        raise TooManySeries(f"more than {MAX_SAMPLES} samples in the readings of an export")
                    taken += self._settle(is_over=True)
                    self._open, self._place = {}, self._place + 1
                self._add(series, value, point)
        return [*taken, *self._settle(is_over=False)]

    def _beginning(self, points: Iterable[Point]) -> list[Taken]:
        """The reading at the start of the first deltas, so that they are a window of their own."""
        counters = [point for point in points if point.temporality != "none" and point.is_monotonic]
        starts = [point.start_ns for point in counters if point.temporality == "delta" and point.start_ns]
        if self._last or self._open or not starts or len(starts) < len(counters):
            return []
        return [Taken(Reading(moment(min(starts)), {}), -1)]

    def _is_known(self, series: Series, point: Point) -> bool:
        """Whether it arrived before, or belongs to a completed reading."""
        of_series = (known[series].at_ns for known in (self._open, self._last, self._sums) if series in known)
        if point.at_ns <= max(of_series, default=-1):
            return True
        is_delta = point.temporality == "delta"
        return bool(self._open) and not is_delta and point.at_ns < self._began_ns - TOGETHER_NS

    def _add(self, series: Series, value: float, point: Point) -> None:
        if self.series >= self._most and series not in self._open:
            raise TooManySeries(
                f"more than {MAX_SERIES} series of one resource"
                if self._most == MAX_SERIES
                else f"no room for more than the {self._most} series that are already remembered"
            )
        self._began_ns = min(self._began_ns, point.at_ns) if self._open else point.at_ns
        self.newest_ns = max(self.newest_ns, point.at_ns)
        if point.temporality == "delta":
            so_far = self._sums[series].value if series in self._sums else 0.0
            self._sums[series] = self._open[series] = _Value(so_far + value, point.at_ns)
        else:
            if point.start_ns == point.at_ns:  # a counter that has just begun has counted nothing to export
                self._found.add(point.at_ns)
            is_start = point.start_ns < point.at_ns and point.start_ns not in self._found
            is_counter = point.temporality == "cumulative" and point.is_monotonic
            self._open[series] = _Value(
                value, point.at_ns, point.start_ns if is_start else 0, is_counter, point.start_ns
            )
        self._is_told = False

    def _settle(self, *, is_over: bool) -> list[Taken]:
        if self._is_told:
            return []
        has_restarted = self._has_restarted()
        missing = _counters(self._last) - _counters(self._open)
        if missing and not is_over:
            return []
        if has_restarted:
            missing = set()
        if missing:
            self._passed_over += 1
            if self._passed_over < PATIENCE:
                return []
        new = set() if has_restarted or not self._last else self._counting_since_before()
        left_out = "; ".join(
            f"{words} {', '.join(sorted({name for name, _ in series})[:3])}"
            for words, series in (("it exports no more", missing), ("it has begun to export", new))
            if series
        )
        self._is_told, self._passed_over = True, 0
        self._last = dict(self._open)
        self._found &= {known.told_ns for known in self._open.values()}
        return [Taken(self._reading(), self._place, left_out)]

    def _counting_since_before(self) -> set[Series]:
        """Counters that are missing in the previous reading, but began to count before it."""
        before_ns = max(known.at_ns for known in self._last.values()) - SAME_START_SECONDS * 1e9
        new = _counters(self._open) - self._last.keys()
        return {series for series in new if self._open[series].start_ns < before_ns}

    def _has_restarted(self) -> bool:
        both = (
            (series, self._last[series], now) for series, now in self._open.items() if series in self._last
        )
        return any(
            abs(now.value - then.value) > SAME_START_SECONDS
            if name == START_TIME
            else now.is_counter and now.value < then.value
            for (name, _), then, now in both
        )

    def _reading(self) -> Reading:
        samples: dict[str, dict[Labels, float]] = defaultdict(dict)
        starts: dict[str, dict[Labels, float]] = defaultdict(dict)
        for (name, labels), known in (self._sums | self._open).items():
            if name == START_TIME and self._sums:
                continue  # sums of deltas go on over a restart: they are no counts since it
            samples[name][labels] = known.value
            if known.is_counter and known.start_ns:
                starts[name][labels] = known.start_ns / 1e9
        at_ns = max(known.at_ns for known in self._open.values())
        return Reading(moment(at_ns), dict(samples), dict(starts))


def _counters(values: dict[Series, _Value]) -> set[Series]:
    return {series for series, known in values.items() if known.is_counter}
