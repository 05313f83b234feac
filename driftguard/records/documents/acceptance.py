"""An acceptance rate with its interval."""

from __future__ import annotations

from dataclasses import dataclass

from driftguard.records.positions import Positions


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
