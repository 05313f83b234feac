"""False-alarm rates from times to the first alarm, and the threshold that gives a wanted rate.

Streams are watched until their first alarm or their end. Requests watched / alarms is the maximum
likelihood estimate of the mean time to a false alarm under censoring when alarms come at a constant rate,
and the usual estimate of the mean time between alarms in any case; its interval treats the number of
alarms as Poisson (Garwood 1936), so it also exists without a single alarm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaincinv

Floats = NDArray[np.float64]

LEVEL = 0.95
CLOSE_ENOUGH = 0.10  # of the wanted time, when a search may stop early
MOST_STEPS = 10


@dataclass(frozen=True, slots=True)
class FalseAlarms:
    watched: int  # requests
    alarms: int

    @property
    def mean_time(self) -> float:
        return self.watched / self.alarms if self.alarms else math.inf

    @property
    def interval(self) -> tuple[float, float]:
        tail = (1.0 - LEVEL) / 2.0
        most = float(gammaincinv(self.alarms + 1, 1.0 - tail))
        fewest = float(gammaincinv(self.alarms, tail)) if self.alarms else 0.0
        return self.watched / most, self.watched / fewest if fewest else math.inf


@dataclass(frozen=True, slots=True)
class Calibrated:
    """A threshold, and what it realised on the streams it was chosen on."""

    threshold: float
    realised: FalseAlarms


def from_paths(paths: Sequence[Floats], wanted: float) -> Calibrated:
    """The lowest threshold at which paths of a statistic cross it once in `wanted` requests or less often."""
    maxima = [np.maximum.accumulate(path) for path in paths]
    candidates = np.unique(np.concatenate([np.unique(peak) for peak in maxima]))
    low, high = 0, len(candidates) - 1
    while low < high:
        middle = (low + high) // 2
        if _crossings(maxima, float(candidates[middle])).mean_time >= wanted:
            high = middle
        else:
            low = middle + 1
    return Calibrated(float(candidates[low]), _crossings(maxima, float(candidates[low])))


def _crossings(maxima: Sequence[Floats], threshold: float) -> FalseAlarms:
    first = [int(np.searchsorted(peak, threshold)) for peak in maxima]
    watched = sum(min(place + 1, len(peak)) for place, peak in zip(first, maxima, strict=True))
    return FalseAlarms(watched, sum(place < len(peak) for place, peak in zip(first, maxima, strict=True)))


def by_search(
    false_alarms: Callable[[float], FalseAlarms], low: float, high: float, wanted: float
) -> Calibrated:
    """Geometric bisection between a threshold that alarms too often and one that alarms too seldom.

    Where even `high` alarms too often, `high` and its realised rate are the answer.
    """
    best = Calibrated(high, false_alarms(high))
    for _ in range(MOST_STEPS):
        if (
            abs(math.log(best.realised.mean_time / wanted)) <= CLOSE_ENOUGH
            or best.realised.mean_time < wanted
        ):
            return best
        middle = math.sqrt(low * high)
        tried = Calibrated(middle, false_alarms(middle))
        if tried.realised.mean_time >= wanted * (1.0 - CLOSE_ENOUGH):
            best, high = tried, middle
        else:
            low = middle
    return best
