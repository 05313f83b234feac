"""Other detectors of an acceptance rate: river's drift detectors, averages with a threshold, burn rates.

All of them see the stream as a whole, request by request, and may use its first REFERENCE requests as known
good. A detector that can be set to look for falls only is set so. Parameters other than the threshold keep
river's defaults. HDDM is made for bits; its bounds hold for any numbers in [0, 1], and it is fed 1 - x. The
threshold is the detector's own, minus log10 of it where it is a probability: larger is stricter.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
from river import drift
from river.drift import kswin
from river.drift.binary import HDDMA, HDDMW
from scipy.stats import ks_2samp

from tests.benchmarks.detection.bocpd import log_odds
from tests.benchmarks.detection.traffic import Floats, Traffic

REFERENCE = 2_000
KSWIN_MEMORY = 100
MINUTE = 60  # requests: one ends per second
BURN_RATE_SLOW_TO_FAST = 6.0 / 14.4  # of the workbook's 6h/30m and 1h/5m pages


@dataclass(frozen=True, slots=True)
class PathDetector:
    """Alarms when a statistic that does not depend on the threshold reaches it."""

    name: str
    paths: Callable[[Sequence[Traffic]], list[Floats]]  # minus infinity within the reference period


@dataclass(frozen=True, slots=True)
class RiverDetector:
    """One of river's, fed x or 1 - x; alarms within the reference period do not count."""

    name: str
    make: Callable[[float], Any]  # from the threshold
    loosest: float
    strictest: float
    of_errors: bool = False

    def first_alarm(self, threshold: float, traffic: Traffic) -> int | None:
        detector = self.make(threshold)
        values = (1.0 - traffic.x if self.of_errors else traffic.x).tolist()
        for place, value in enumerate(values):
            detector.update(value)
            if detector.drift_detected and place >= REFERENCE:
                return place
        return None


@dataclass(frozen=True, slots=True)
class Kswin:
    """river's KSWIN. It remembers 100 requests, so nothing earlier is fed to it."""

    name: str = "KSWIN"

    def first_alarm(self, threshold: float, traffic: Traffic) -> int | None:
        """The first alarm once the window is full."""
        detector = drift.KSWIN(alpha=10.0**-threshold * (1.0 + 1e-9), seed=0)
        for place, value in enumerate(traffic.x.tolist()):
            detector.update(value)
            if detector.drift_detected:
                return place
        return None

    def path(self, traffic: Traffic) -> Floats:
        """Minus log10 of the p-value after every request; with alpha = 0 the detector never starts anew."""
        detector, path = drift.KSWIN(alpha=0.0, seed=0), np.zeros(len(traffic))
        for place, value in enumerate(traffic.x.tolist()):
            detector.update(value)
            if len(detector.window) == KSWIN_MEMORY:
                path[place] = -np.log10(detector.p_value)
        return path


def _adwin(threshold: float) -> Any:
    return drift.ADWIN(delta=10.0**-threshold)


def _page_hinkley(threshold: float) -> Any:
    return drift.PageHinkley(threshold=threshold, mode="down")


def _hddm_a(threshold: float) -> Any:
    return HDDMA(drift_confidence=10.0**-threshold, warning_confidence=10.0**-threshold)


def _hddm_w(threshold: float) -> Any:
    return HDDMW(drift_confidence=10.0**-threshold, warning_confidence=10.0**-threshold)


def _since(reference: int, path: Floats) -> Floats:
    path[:reference] = -np.inf
    return path


@cache
def _p_value(size: int, steps: int) -> float:
    """scipy's p-value of two samples of `size` whose distribution functions are steps / size apart."""
    return float(ks_2samp(np.arange(size), np.arange(size) + steps - 0.5 * (steps > 0)).pvalue)


def _two_sample_test(one: Sequence[float], other: Sequence[float], method: str) -> tuple[float, float]:
    """ks_2samp for samples of one size, 20 times as fast: the p-value depends on the distance alone."""
    first, second = np.sort(one), np.sort(other)
    both = np.concatenate([first, second])
    apart = np.searchsorted(first, both, side="right") - np.searchsorted(second, both, side="right")
    steps = int(np.abs(apart).max())
    return steps / len(first), _p_value(len(first), steps)


kswin.stats = SimpleNamespace(ks_2samp=_two_sample_test)


def _share_accepted(traffic: Traffic, requests: int) -> Floats:
    """Accepted / drafted of the last `requests` requests (of all, while there are fewer)."""
    sums = [np.cumsum(column) for column in (traffic.accepted, traffic.layout.drafted)]
    accepted, drafted = (
        np.concatenate([total[:requests], total[requests:] - total[:-requests]]) for total in sums
    )
    share: Floats = accepted / drafted
    return share


def _five_minutes(streams: Sequence[Traffic]) -> list[Floats]:
    """How far the average of five minutes lies below that of the reference period."""
    return [
        _since(REFERENCE, _reference_share(traffic) - _share_accepted(traffic, 5 * MINUTE))
        for traffic in streams
    ]


def _burn_rates(streams: Sequence[Traffic]) -> list[Floats]:
    """Multi-window, multi-burn-rate (Google SRE Workbook, chapter 5): page when the error budget burns too
    fast in a long and in a short window, 1h and 5m or 6h and 30m.

    Errors are rejected tokens, the budget is the share rejected in the reference period. The workbook's
    factors of 14.4 and 6 cannot be reached when a third is rejected in good times, so the excess over 1 is
    calibrated and only its ratio between the two pairs is the workbook's.
    """
    paths = []
    for traffic in streams:
        budget = 1.0 - _reference_share(traffic)
        hour, five, six_hours, thirty = (
            (1.0 - _share_accepted(traffic, minutes * MINUTE)) / budget - 1.0 for minutes in (60, 5, 360, 30)
        )
        slow = np.minimum(six_hours, thirty) / BURN_RATE_SLOW_TO_FAST
        paths.append(_since(REFERENCE, np.maximum(np.minimum(hour, five), slow)))
    return paths


def _bocpd(streams: Sequence[Traffic]) -> list[Floats]:
    return list(log_odds(np.stack([traffic.x for traffic in streams]), REFERENCE))


def _reference_share(traffic: Traffic) -> float:
    return float(traffic.accepted[:REFERENCE].sum() / traffic.layout.drafted[:REFERENCE].sum())


COMPETITORS: tuple[PathDetector | RiverDetector | Kswin, ...] = (
    RiverDetector("ADWIN", _adwin, 1e-3, 300.0),
    RiverDetector("PageHinkley", _page_hinkley, 0.1, 1e4),
    RiverDetector("HDDM_A", _hddm_a, 1e-3, 300.0, of_errors=True),
    RiverDetector("HDDM_W", _hddm_w, 1e-3, 300.0, of_errors=True),
    Kswin(),
    PathDetector("5-minute average", _five_minutes),
    PathDetector("burn rates", _burn_rates),
    PathDetector("BOCPD", _bocpd),
)
SLOW = ("HDDM_A", "HDDM_W", "KSWIN")  # 5 to 50 µs a request: measured on less traffic
