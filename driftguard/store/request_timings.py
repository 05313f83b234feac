"""What stored records tell about speed, and about the time of a change."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from typing import Any, Final

from sqlalchemy import select, text
from sqlalchemy.orm import Session

from driftguard.cost import TimedRequest
from driftguard.records.positions import first_position
from driftguard.store.tables import Record, Stream

REQUESTS: Final = 2_000  # newest on each side of a change point
WITHOUT: Final = 1_000  # newest requests without speculation
LOOK_BACK: Final = timedelta(days=7)
WITHOUT_LOOK_BACK: Final = timedelta(days=1)  # seconds per step are compared, so from the same hours
_AHEAD: Final = timedelta(hours=1)  # records arrive a little out of order


def ended_at(session: Session, stream_id: int, seqs: Collection[int]) -> dict[int, datetime]:
    """When these records of a stream ended; those past their retention are missing."""
    query = select(Record.seq, Record.ended_at).where(Record.stream_id == stream_id, Record.seq.in_(seqs))
    return {row.seq: row.ended_at for row in session.execute(query)}


_BETWEEN = text(
    """
    SELECT extract(epoch FROM r.ended_at)::float8 AS ended_at, r.segment, r.num_speculative_tokens,
           r.concurrency, r.steps, r.drafted, r.accepted, r.emitted, r.accepted_per_position,
           r.output_tokens, r.time_per_output_token_seconds, r.kind,
           r.drafted_per_position[1] AS first_drafted, r.accepted_per_position[1] AS first_accepted
    FROM records r
    WHERE r.stream_id = :stream_id AND r.kind <> 'probe' AND r.seq >= :first AND r.seq < :end
      AND r.ended_at >= :since AND r.ended_at <= :until
    ORDER BY r.ended_at DESC, r.seq DESC LIMIT :limit
    """
)


def between(
    session: Session, stream_id: int, first: int, end: int, newest_ended_at: datetime
) -> list[TimedRequest]:
    """The newest of a stream's seqs `first` to `end` - 1, up to a week older than `newest_ended_at`."""
    values = {"stream_id": stream_id, "first": first, "end": end, "limit": REQUESTS}
    return _requests(session, values, newest_ended_at, LOOK_BACK)


def without_speculation(
    session: Session, stream: Stream, end: int, newest_ended_at: datetime
) -> list[TimedRequest]:
    """The newest requests of the same server and target that had no draft, up to a day older."""
    same = (Stream.server == stream.server, Stream.target == stream.target, Stream.method == "none")
    found = []
    for stream_id in session.scalars(select(Stream.id).where(*same)).all():
        values = {"stream_id": stream_id, "first": 0, "end": end, "limit": WITHOUT}
        found += _requests(session, values, newest_ended_at, WITHOUT_LOOK_BACK)
    return sorted(found, key=lambda item: item.ended_at, reverse=True)[:WITHOUT]


def _requests(
    session: Session, values: Mapping[str, Any], newest: datetime, look_back: timedelta
) -> list[TimedRequest]:
    span = {"since": newest - look_back, "until": newest + _AHEAD}
    return [_timed(*row) for row in session.execute(_BETWEEN, {**values, **span})]


def _timed(*row: Any) -> TimedRequest:
    *told, kind, first_drafted, first_accepted = row
    found = TimedRequest(*told)
    first = first_position(kind, found.num_speculative_tokens, first_drafted, first_accepted)
    return found._replace(by_first=first is not None)
