"""What stored records tell about the moment of a change: its time, and the speed before and after it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from driftguard.store.tables import Record

SPEED_SAMPLE = 2_000  # requests on each side of a change point
SPEED_LOOK_BACK = timedelta(days=7)


@dataclass(frozen=True, slots=True)
class Speed:
    """Decoding on one side of a change point. None where no record tells."""

    tokens_per_second: float | None  # per request: requests / sum of time per output token
    num_speculative_tokens: float | None  # drafted / steps


def ended_at(session: Session, stream_id: int, seqs: Collection[int]) -> dict[int, datetime]:
    """When these records of a stream ended; those past their retention are missing."""
    query = select(Record.seq, Record.ended_at).where(Record.stream_id == stream_id, Record.seq.in_(seqs))
    return {row.seq: row.ended_at for row in session.execute(query)}


_SPEEDS = text(
    """
    SELECT side, count(tpot) AS timed, sum(tpot) AS seconds, sum(drafted) AS drafted, sum(steps) AS steps
    FROM (
        (SELECT 'before' AS side, time_per_output_token_seconds AS tpot, drafted, steps FROM records
         WHERE stream_id = :stream_id AND kind <> 'probe' AND segment = ANY(:segments)
           AND seq < :change_point AND ended_at >= :since AND ended_at <= :until
         ORDER BY seq DESC LIMIT :limit)
        UNION ALL
        (SELECT 'after', time_per_output_token_seconds, drafted, steps FROM records
         WHERE stream_id = :stream_id AND kind <> 'probe' AND segment = ANY(:segments)
           AND seq >= :change_point AND seq <= :newest AND ended_at >= :since AND ended_at <= :until
         ORDER BY seq DESC LIMIT :limit)
    ) AS sides GROUP BY side
    """
)


def around(
    session: Session,
    stream_id: int,
    segments: Sequence[str],
    *,
    change_point: int,
    newest: int,
    newest_ended_at: datetime,
) -> tuple[Speed, Speed]:
    """Speed of the changed segments before and after the change point (a seq), up to `newest`.

    Like is compared with like: other segments, whose share may have changed, are left out.
    """
    rows = session.execute(
        _SPEEDS,
        {
            "stream_id": stream_id,
            "segments": list(segments),
            "change_point": change_point,
            "newest": newest,
            "since": newest_ended_at - SPEED_LOOK_BACK,
            "until": newest_ended_at + timedelta(days=1),  # records arrive a little out of order
            "limit": SPEED_SAMPLE,
        },
    )
    sides = {row.side: _speed(row) for row in rows}
    nothing = Speed(None, None)
    return sides.get("before", nothing), sides.get("after", nothing)


def _speed(row: Any) -> Speed:
    return Speed(
        tokens_per_second=row.timed / row.seconds if row.timed and row.seconds else None,
        num_speculative_tokens=float(row.drafted / row.steps) if row.steps else None,
    )
