"""Acceptance: a rate with its interval, and how it changed."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from driftguard.records.positions import Positions

Reason = Literal["answers are longer", "answers are shorter", "requests with many draft tokens count more"]
NOTICEABLE: Final = 0.02  # levels as counted and as tested that lie further apart are both told


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance rate (sum of accepted / sum of drafted) of some requests, with a 95% interval.

    `positions`: the sums are over all draft positions, or over the first, see driftguard.records.positions.
    """

    rate: float
    low: float
    high: float
    requests: int
    positions: Positions = "all"


@dataclass(frozen=True, slots=True)
class AdjustedChange:
    """A change as it is tested: mean acceptance per request since the change point (`after`), and what such
    requests, as long and at such hours, would have accepted without the change (`before`).

    `counted_before`, `counted_after`: the same as sums of accepted / sums of drafted, at the same hours but
    not adjusted for the length of answers. `because`: why these tell something else, the strongest reason
    first.
    """

    before: float
    after: float
    counted_before: float
    counted_after: float
    because: tuple[Reason, ...] = ()

    @property
    def counted_differs(self) -> bool:
        """Do the levels as counted differ noticeably from those that were tested, or the direction?"""
        before, after = self.counted_before, self.counted_after
        apart = max(abs(before - self.before), abs(after - self.after))
        return apart > NOTICEABLE or (self.after - self.before) * (after - before) < 0.0


@dataclass(frozen=True, slots=True)
class Gradual:
    """A change as one that began at an onset and has been linear in time since then, until the alarm.

    `onset`: seq of the first record after it, or of the oldest one that the detector still had; the time may
    be earlier. `certain`: this is likelier than any change at once, by more than 95% of changes at once make
    it look; else both are possible. Either way the interval holds the onset in at least nine of ten.
    """

    onset: int
    onset_at: datetime
    interval: tuple[datetime, datetime]  # of the onset
    moved: float  # of acceptance per request, from the onset to the alarm; below 0 for a fall
    per_day: float
    certain: bool

    @property
    def rate(self) -> str:
        """For example: 0.02 a day; 0.05 an hour."""
        if abs(self.per_day) >= 0.24:
            return f"{abs(self.per_day) / 24.0:.2f} an hour"
        return f"{abs(self.per_day):.{2 if abs(self.per_day) >= 0.01 else 3}f} a day"


def from_to(before: float, after: float) -> str:
    """For example "0.70 to 0.62": with as many decimals, two to four, as it takes to tell them apart."""
    for decimals in (2, 3):
        told = f"{before:.{decimals}f} to {after:.{decimals}f}"
        if f"{before:.{decimals}f}" != f"{after:.{decimals}f}":
            return told
    return f"{before:.4f} to {after:.4f}"
