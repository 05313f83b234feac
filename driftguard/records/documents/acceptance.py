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

    def is_at(self, level: float) -> bool:
        """Does it lie not noticeably off this level, or could it by its interval?"""
        return abs(self.rate - level) <= NOTICEABLE or self.low <= level <= self.high


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
    """A change as one that began at an onset and was linear in time from there until `until`.

    `onset`: seq of the first record after it, or of the oldest one that the detector still had; the time may
    be earlier. `certain`: this is likelier than any change at once, by more than 95% of changes at once make
    it look; else both are possible. Either way the interval holds the onset in at least nine of ten.
    """

    onset: int
    onset_at: datetime
    interval: tuple[datetime, datetime]  # of the onset
    until: datetime  # the newest record that was looked at, or where it ended
    moved: float  # of acceptance per request, from the onset to `until`; below 0 for a fall
    per_day: float
    certain: bool
    over: bool  # it ended before the newest record that was looked at

    @property
    def rate(self) -> str:
        """For example: 0.02 a day; 0.05 an hour."""
        if abs(self.per_day) >= 0.24:
            return f"{abs(self.per_day) / 24.0:.2f} an hour"
        return f"{abs(self.per_day):.{2 if abs(self.per_day) >= 0.01 else 3}f} a day"

    @property
    def text(self) -> str:
        """Of one that is certain, for example: it has been falling since about 2026-11-20 04:10 UTC (between
        .. and ..), by 0.03 until 2026-11-22 08:00 UTC, about 0.02 a day."""
        onset, first, last, until = (
            f"{at:%Y-%m-%d %H:%M} UTC" for at in (self.onset_at, *self.interval, self.until)
        )
        since, by = f"about {onset} (between {first} and {last})", f"{abs(self.moved):.2f}"
        if self.over:
            verb = "fell" if self.moved < 0.0 else "rose"
            return f"it {verb} bit by bit from {since} to about {until}, by {by}, about {self.rate}"
        verb = "falling" if self.moved < 0.0 else "rising"
        return f"it has been {verb} since {since}, by {by} until {until}, about {self.rate}"


def from_to(before: float, after: float) -> str:
    """For example "0.70 to 0.62": with as many decimals, two to four, as it takes to tell them apart."""
    for decimals in (2, 3):
        told = f"{before:.{decimals}f} to {after:.{decimals}f}"
        if f"{before:.{decimals}f}" != f"{after:.{decimals}f}":
            return told
    return f"{before:.4f} to {after:.4f}"
