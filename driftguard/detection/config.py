"""What an operator may choose about detection; everything else follows from the traffic."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from driftguard.errors import BadSettings

SMALLEST_FALSE_ALARM_EVERY = 100.0
LARGEST_FALSE_ALARM_EVERY = 1e15  # keeps every sum of evidence far from the largest float
LARGEST_FALSE_ALARM_DAYS = 1e9


@dataclass(frozen=True, slots=True, kw_only=True)
class DetectorConfig:
    """Settings of one detector. Raises BadSettings that names the field.

    `false_alarm_every` is A of the guarantee: while nothing changed, the expected number of requests
    until a false alarm (of either direction) is at least A. With `false_alarm_days` set, A becomes
    max(false_alarm_every, days x the stream's requests per day), measured over its reference period at
    first, and over its days from the first whole one on.
    """

    false_alarm_every: float = 100_000.0  # requests
    false_alarm_days: float | None = None
    minimum_drop: float = 0.05  # of the acceptance rate; sets the size of the reference period
    ignore: float = 0.005  # changes of the acceptance rate up to this are no change
    history: int = 8192  # newest requests kept to locate a change point

    def __post_init__(self) -> None:
        _within(
            "false_alarm_every", self.false_alarm_every, SMALLEST_FALSE_ALARM_EVERY, LARGEST_FALSE_ALARM_EVERY
        )
        _within("minimum_drop", self.minimum_drop, 0.002, 0.9)
        _within("ignore", self.ignore, 0.0, 0.5)
        _within("history", self.history, 256, 2**20)
        if self.false_alarm_days is not None:
            _within("false_alarm_days", self.false_alarm_days, 1e-6, LARGEST_FALSE_ALARM_DAYS)

    def times(self, factor: float) -> DetectorConfig:
        """The same with `factor` times A, for every traffic (up to the largest A there is)."""
        days = self.false_alarm_days
        return replace(
            self,
            false_alarm_every=min(self.false_alarm_every * factor, LARGEST_FALSE_ALARM_EVERY),
            false_alarm_days=None if days is None else min(days * factor, LARGEST_FALSE_ALARM_DAYS),
        )

    def threshold(self, requests_per_day: float) -> float:
        """A in requests, for a stream with this traffic (0 where it is not known)."""
        if self.false_alarm_days is None:
            return self.false_alarm_every
        wanted = self.false_alarm_days * requests_per_day
        return min(max(self.false_alarm_every, wanted), LARGEST_FALSE_ALARM_EVERY)


def _within(field: str, value: float, low: float, high: float) -> None:
    if not (math.isfinite(value) and low <= value <= high):
        raise BadSettings(f"{field}: {value} is not between {low:g} and {high:g}")
