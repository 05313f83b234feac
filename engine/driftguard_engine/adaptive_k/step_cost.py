"""Seconds per step as a function of the rows in it and K, learned from the steps themselves. No tensors.

The newest times of each (bucket of batch sizes, K) are kept with their median, which one slow step does not
move. A K without times of its own is interpolated between its neighbours; a batch size without times takes
the shape of the nearest one that has them. The machine's speed (other load, clock rate) changes all times
together, and sooner than rare steps can be measured again: it is one factor, and kept times are relative to
it.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from operator import mul
from statistics import median
from typing import Final

ENOUGH: Final = 3  # times that make a median
_KEPT: Final = 21
_LINE_WEIGHT: Final = 10.0  # of the line in `_fit`, in measured times
_OF_THE_MACHINE: Final = 9  # steps; fewer than half of _KEPT, so that no median moves before the factor
_EXCEPTIONS: Final = 2
_LEAST_CHANGE: Final = 1.15
_UNKNOWN_SLOPE: Final = 0.1  # seconds per draft token, as a share of a step without; until measured


@cache
def bucket_of(rows: int) -> int:
    """Batch sizes that are measured as one: each alone up to 8, then four to a doubling (10, 12, 14, 16)."""
    width = 1 << max(0, max(rows - 1, 1).bit_length() - 3)
    return -(-rows // width) * width


@dataclass(slots=True)
class _Times:
    """Of one bucket and K, in seconds at the machine's usual speed."""

    newest: deque[float] = field(default_factory=lambda: deque(maxlen=_KEPT))
    median: float = 0.0
    step: int = 0  # when the newest was measured

    def add(self, seconds: float, step: int) -> None:
        self.newest.append(seconds)
        self.median = median(self.newest)
        self.step = step


class StepCost:
    """See the module."""

    def __init__(self) -> None:
        self._times: dict[int, dict[int, _Times]] = {}  # bucket -> K -> times
        self._now = 1.0  # factor of the machine: above 1 it is slower than usual
        self._changes: deque[float] = deque(maxlen=_OF_THE_MACHINE)  # of the newest steps against it
        self._steps = 0

    def add(self, rows: int, k: int, seconds: float) -> None:
        """One step that did nothing but decode."""
        self._steps += 1
        times = self._times.setdefault(bucket_of(rows), {}).setdefault(k, _Times())
        if len(times.newest) >= _OF_THE_MACHINE:
            self._follow_machine(seconds / (times.median * self._now))
        times.add(seconds / self._now, self._steps)

    def _follow_machine(self, change: float) -> None:
        """Follows a change only where nearly all of the newest steps show it: else noise would add up."""
        self._changes.append(change)
        ordered = sorted(self._changes)
        if len(ordered) == _OF_THE_MACHINE and (
            ordered[_EXCEPTIONS] > _LEAST_CHANGE or ordered[-1 - _EXCEPTIONS] < 1.0 / _LEAST_CHANGE
        ):
            self._now *= median(ordered)
            self._changes.clear()

    def is_known(self, rows: int, k: int) -> bool:
        return k in self._known(bucket_of(rows))

    def age(self, rows: int, k: int) -> int:
        """How many steps were measured since one of this kind was; all of them where none ever was."""
        times = self._times.get(bucket_of(rows), {}).get(k)
        return self._steps - (times.step if times else 0)

    def seconds(self, rows: int, largest_k: int) -> list[float] | None:
        """[largest_k + 1] seconds of a step with K = 0, 1, ...; None where nothing is known."""
        shape = [1.0 + _UNKNOWN_SLOPE * k for k in range(largest_k + 1)]
        nearest, own = self._nearest(bucket_of(rows)), self._known(bucket_of(rows))
        if nearest is None and not own:
            return None
        if nearest is not None:
            shape = _fit(shape, self._known(nearest))
        return [self._now * each for each in _fit(shape, own)]

    def smallest_known(self) -> int | None:
        """The smallest bucket at which steps with and without speculation were measured."""
        return min((bucket for bucket in self._times if self._tells_shape(bucket)), default=None)

    def _known(self, bucket: int) -> dict[int, _Times]:
        found = self._times.get(bucket, {})
        return {k: times for k, times in found.items() if len(times.newest) >= ENOUGH}

    def _tells_shape(self, bucket: int) -> bool:
        known = self._known(bucket)
        return 0 in known and len(known) > 1

    def _nearest(self, bucket: int) -> int | None:
        """The nearest other bucket in which times are known for K = 0 and for another K."""
        others = [other for other in self._times if other != bucket and self._tells_shape(other)]
        return min(others, key=lambda other: abs(math.log(other / bucket)), default=None)


def _fit(shape: Sequence[float], known: Mapping[int, _Times]) -> list[float]:
    """The shape, scaled at each K to what is known.

    The measured scales of K > 0 are shrunk towards the straight line through them, the more the fewer times
    they rest on. K = 0 keeps its own. A K that was not measured is interpolated between its neighbours.
    """
    measured = {k: known[k].median / shape[k] for k in sorted(known) if k < len(shape)}
    drafting = [k for k in measured if k > 0]
    line = _line(drafting, [measured[k] for k in drafting], [len(known[k].newest) for k in drafting])
    for k in drafting:
        weight = len(known[k].newest) / (len(known[k].newest) + _LINE_WEIGHT)
        measured[k] = weight * measured[k] + (1.0 - weight) * line(k)
    return [each * scale for each, scale in zip(shape, _between(measured, len(shape)), strict=True)]


def _line(xs: Sequence[int], ys: Sequence[float], weights: Sequence[int]) -> Callable[[int], float]:
    """Weighted least squares; constant where there is only one x."""
    total = sum(weights) or 1
    x_mean = sum(map(mul, weights, xs)) / total
    y_mean = sum(map(mul, weights, ys)) / total
    spread = sum(weight * (x - x_mean) ** 2 for weight, x in zip(weights, xs, strict=True))
    both = sum(weight * (x - x_mean) * y for weight, x, y in zip(weights, xs, ys, strict=True))
    slope = both / spread if spread > 0.0 else 0.0
    return lambda x: y_mean + slope * (x - x_mean)


def _between(points: Mapping[int, float], count: int) -> list[float]:
    """[count] at 0, 1, ...: linear between the points (ascending), constant outside; 1 without any point."""
    if not points:
        return [1.0] * count
    xs, found, above = list(points), [], 0
    for x in range(count):
        while above < len(xs) and xs[above] < x:
            above += 1
        high, low = xs[min(above, len(xs) - 1)], xs[max(above - 1, 0)]
        part = (x - low) / (high - low) if high > low else 0.0
        found.append(points[low] + part * (points[high] - points[low]))
    return found
