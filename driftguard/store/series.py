"""Acceptance over time, with what happened: for charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from driftguard.store.rollup_tiers import TIERS, coarsest
from driftguard.store.tables import Draft


@dataclass(frozen=True, slots=True)
class Bin:
    """Counts of one stream and segment over one stretch of time."""

    stream_id: int
    segment: str
    at: datetime
    requests: int
    drafted: int
    accepted: int


_FINE_BINS = text(
    """
    SELECT stream_id, segment,
           date_bin(make_interval(secs => :seconds), ended_at, 'epoch'::timestamptz) AS at,
           count(*) AS requests, sum(drafted) AS drafted, sum(accepted) AS accepted
    FROM records WHERE stream_id = ANY(:streams) AND kind <> 'probe'
      AND ended_at >= :since AND ended_at < :until
    GROUP BY 1, 2, 3 ORDER BY 3
    """
)
_ROLLED_BINS = {
    resolution: text(
        f"""
        SELECT stream_id, segment,
               date_bin(make_interval(secs => :seconds), minute, 'epoch'::timestamptz) AS at,
               sum(records) AS requests, sum(drafted) AS drafted, sum(accepted) AS accepted
        FROM {tier.table.__tablename__} WHERE stream_id = ANY(:streams) AND kind <> 'probe'
          AND minute >= :since AND minute < :until
        GROUP BY 1, 2, 3 ORDER BY 3
        """  # noqa: S608 (constants only)
    )
    for resolution, tier in TIERS.items()
}


def bins(
    session: Session, stream_ids: Sequence[int], since: datetime, until: datetime, bin_seconds: int
) -> list[Bin]:
    """In order of time. Below a minute they come from the records, else from rollups, of which that minute,
    hour or day counts whole that holds `since`."""
    tier = coarsest(bin_seconds)
    begin = tier.start(since) if tier else since
    rows = session.execute(
        _ROLLED_BINS[tier.resolution] if tier else _FINE_BINS,
        {"streams": list(stream_ids), "since": begin, "until": until, "seconds": bin_seconds},
    )
    return [_bin(row) for row in rows]


def _bin(row: Any) -> Bin:
    return Bin(row.stream_id, row.segment, row.at, int(row.requests), int(row.drafted), int(row.accepted))


def promotions(session: Session, server: str, target: str, since: datetime) -> list[Draft]:
    """Candidates that were put into service there, oldest first."""
    query = (
        select(Draft)
        .where(
            Draft.server == server,
            Draft.target == target,
            Draft.promoted_at >= since,
            Draft.parent_version.is_not(None),  # a draft that was there already was not promoted
        )
        .order_by(Draft.promoted_at)
    )
    return list(session.scalars(query))
