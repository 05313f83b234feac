"""The tiers of the rollups: the same sums per minute, hour and day of UTC, the coarser the longer kept."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Final, Literal

from driftguard.settings import RetentionSettings
from driftguard.store.tables import DailyRollup, HourlyRollup, Rollup, RollupTier

# Of a record that tells how many draft tokens were accepted at a position: how many were drafted there; where
# it does not tell that, its steps (driftguard.records.positions.per_position).
DRAFTED_THERE: Final = (
    "CASE WHEN accepted_per_position[{0}] IS NOT NULL THEN coalesce(drafted_per_position[{0}], steps) END"
)

Resolution = Literal["minute", "hour", "day"]


@dataclass(frozen=True, slots=True)
class Tier:
    resolution: Resolution
    seconds: int
    table: type[RollupTier]

    def days_kept(self, retention: RetentionSettings) -> int:
        """No rollup is kept for longer than rollups_days."""
        longest = retention.rollups_days
        match self.resolution:
            case "minute":
                return min(retention.minute_rollups_days, longest)
            case "hour":
                return min(retention.hourly_rollups_days, longest)
            case "day":
                return longest

    def kept_since(self, now: datetime, retention: RetentionSettings) -> datetime:
        """Whatever ended at this moment or later is in this tier."""
        oldest = now.astimezone(UTC) - timedelta(days=self.days_kept(retention))
        return oldest.replace(hour=0, minute=0, second=0, microsecond=0)

    def start(self, moment: datetime) -> datetime:
        """The beginning of the minute, hour or day that holds it."""
        return datetime.fromtimestamp(moment.timestamp() // self.seconds * self.seconds, UTC)


TIERS: Final[dict[Resolution, Tier]] = {
    "minute": Tier("minute", 60, Rollup),
    "hour": Tier("hour", 3_600, HourlyRollup),
    "day": Tier("day", 86_400, DailyRollup),
}


def coarsest(bin_seconds: int) -> Tier | None:
    """The tier with the fewest rows of which bins of this width can be made; None below a minute.

    The settings keep each tier for as long as a chart with its bins looks back (RetentionSettings).
    """
    fitting = [tier for tier in TIERS.values() if bin_seconds % tier.seconds == 0]
    return fitting[-1] if fitting else None
