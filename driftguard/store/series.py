"""Acceptance over time, with what happened: for charts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from driftguard.records.positions import POSITIONS_SUMMED
from driftguard.store.rollup_tiers import DRAFTED_THERE, TIERS, coarsest
from driftguard.store.tables import Draft, ServerStart


@dataclass(frozen=True, slots=True)
class Bin:
    """Counts of one stream and segment over one stretch of time."""

    stream_id: int
    segment: str
    at: datetime
    requests: int
    steps: int
    drafted: int
    accepted: int
    emitted: int
    timed: int  # requests that gave their time per output token,
    seconds_per_token: float  # and the sum of these times
    positions: tuple[tuple[int, int], ...]  # drafted and accepted at the first positions; empty: not told


_EACH: Final = range(1, POSITIONS_SUMMED + 1)
_SUMS: Final = ", ".join(f"sum({name}) AS {name}" for name in ("steps", "drafted", "accepted", "emitted"))


def _at_each(there: str) -> str:
    return f"ARRAY[{', '.join(f'sum({there.format(place)})' for place in _EACH)}]"


_ACCEPTED_AT: Final = f"{_at_each('accepted_per_position[{0}]')} AS accepted_at"
_FINE_BINS = text(
    f"""
    SELECT stream_id, segment,
           date_bin(make_interval(secs => :seconds), ended_at, 'epoch'::timestamptz) AS at,
           count(*) AS requests, {_SUMS}, count(time_per_output_token_seconds) AS timed,
           sum(time_per_output_token_seconds) AS seconds_per_token,
           {_ACCEPTED_AT}, {_at_each(DRAFTED_THERE)} AS drafted_at
    FROM records WHERE stream_id = ANY(:streams) AND kind <> 'probe'
      AND ended_at >= :since AND ended_at < :until
    GROUP BY 1, 2, 3 ORDER BY 3
    """  # noqa: S608 (constants only)
)
_ROLLED_BINS = {
    resolution: text(
        f"""
        SELECT stream_id, segment,
               date_bin(make_interval(secs => :seconds), minute, 'epoch'::timestamptz) AS at,
               sum(records) AS requests, {_SUMS}, sum(time_per_output_token_count) AS timed,
               sum(time_per_output_token_sum) AS seconds_per_token,
               {_ACCEPTED_AT}, {_at_each("drafted_per_position[{0}]")} AS drafted_at
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
    told = [pair for pair in zip(row.drafted_at, row.accepted_at, strict=True) if pair[1] is not None]
    return Bin(
        row.stream_id,
        row.segment,
        row.at,
        int(row.requests),
        int(row.steps),
        int(row.drafted),
        int(row.accepted),
        int(row.emitted),
        int(row.timed),
        float(row.seconds_per_token or 0.0),
        tuple((int(drafted or 0), int(accepted)) for drafted, accepted in told),
    )


def server_starts(session: Session, server: str, since: datetime, until: datetime) -> list[datetime]:
    """When its process started, as far as its metrics told, oldest first."""
    query = select(ServerStart.started_at).where(
        ServerStart.server == server, ServerStart.started_at >= since, ServerStart.started_at < until
    )
    return list(session.scalars(query.order_by(ServerStart.started_at)))


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
