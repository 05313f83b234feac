"""One-minute rollups: written with the records (record_sql.py), read as a series for charts."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import text
from sqlalchemy.orm import Session


class RollupPoint(NamedTuple):
    """Sums over one interval of one segment, from `starts_at` on."""

    starts_at: datetime
    segment: str
    records: int
    steps: int
    drafted: int
    accepted: int
    emitted: int
    time_per_output_token_sum: float
    time_per_output_token_count: int
    time_to_first_token_sum: float
    time_to_first_token_count: int


_SERIES = text(
    """
    SELECT date_bin(make_interval(mins => :minutes), minute, 'epoch'::timestamptz) AS starts_at, segment,
      sum(records)::bigint, sum(steps)::bigint, sum(drafted)::bigint, sum(accepted)::bigint,
      sum(emitted)::bigint, sum(time_per_output_token_sum), sum(time_per_output_token_count)::bigint,
      sum(time_to_first_token_sum), sum(time_to_first_token_count)::bigint
    FROM rollups_1m
    WHERE stream_id = :stream_id AND minute >= :since AND minute < :until AND kind = ANY(:kinds)
    GROUP BY 1, 2 ORDER BY 1, 2
    """
)


def series(
    session: Session,
    stream_id: int,
    *,
    since: datetime,
    until: datetime,
    interval_minutes: int = 1,
    kinds: Collection[str] = ("request", "window"),
) -> list[RollupPoint]:
    """Sums per interval and segment, oldest first; intervals without records are left out."""
    rows = session.execute(
        _SERIES,
        {
            "stream_id": stream_id,
            "since": since,
            "until": until,
            "minutes": interval_minutes,
            "kinds": list(kinds),
        },
    )
    return [RollupPoint(*row) for row in rows]
