"""The watch over the goodput of each stream, and the requests that it reads."""

from __future__ import annotations

from datetime import datetime
from typing import Final

from sqlalchemy import or_, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from driftguard.cost.goodput import Numbered
from driftguard.records.documents.goodput import GoodputWatch
from driftguard.store.examination_evidence import LOOK_BACK, timed
from driftguard.store.tables import GoodputWatchRow, Stream

MOST_READ: Final = 5_000  # requests in one look; of more, evenly spaced ones are read,
MOST_SPANNED: Final = 100_000  # of the newest so many


def due(session: Session, before: datetime, *, limit: int) -> list[Stream]:
    """Streams with drafts and traffic since their last look, which was not after `before`; the longest
    unseen first."""
    query = (
        select(Stream)
        .outerjoin(GoodputWatchRow, GoodputWatchRow.stream_id == Stream.id)
        .where(
            Stream.method != "none",
            Stream.traffic_arrived_at.is_not(None),
            or_(
                GoodputWatchRow.looked_at.is_(None),
                (GoodputWatchRow.looked_at < before)
                & (Stream.traffic_arrived_at > GoodputWatchRow.looked_at),
            ),
        )
        .order_by(GoodputWatchRow.looked_at.asc().nulls_first(), Stream.id)
        .limit(limit)
    )
    return list(session.scalars(query))


def lock(session: Session, stream_id: int) -> GoodputWatch:
    """As it is now, and no other sidecar looks before this transaction ends; a first one where there is
    none."""
    first = insert(GoodputWatchRow).values(stream_id=stream_id, watch=GoodputWatch(), looked_at=None)
    session.execute(first.on_conflict_do_nothing())
    query = select(GoodputWatchRow.watch).where(GoodputWatchRow.stream_id == stream_id).with_for_update()
    return session.scalars(query).one()


def known(session: Session, stream_id: int) -> GoodputWatch:
    """A first one where there is none."""
    query = select(GoodputWatchRow.watch).where(GoodputWatchRow.stream_id == stream_id)
    return session.scalars(query).one_or_none() or GoodputWatch()


def store(session: Session, stream_id: int, watch: GoodputWatch, looked_at: datetime) -> None:
    """Of a stream that `lock` has locked."""
    row = session.get_one(GoodputWatchRow, stream_id)
    row.watch, row.looked_at = watch, looked_at


_AFTER = text(
    """
    SELECT seq, ended_at, segment, num_speculative_tokens, concurrency, steps, drafted, accepted, emitted,
           accepted_per_position, output_tokens, time_per_output_token_seconds, kind, first_drafted,
           first_accepted
    FROM (
        SELECT *, row_number() OVER (ORDER BY seq) AS place, count(*) OVER () AS total
        FROM (
            SELECT seq, extract(epoch FROM ended_at)::float8 AS ended_at, segment, num_speculative_tokens,
                   concurrency, steps, drafted, accepted, emitted, accepted_per_position, output_tokens,
                   time_per_output_token_seconds, kind, drafted_per_position[1] AS first_drafted,
                   accepted_per_position[1] AS first_accepted
            FROM records
            WHERE seq > :after AND kind <> 'probe' AND ended_at >= :since AND stream_id IN (
                SELECT id FROM streams
                WHERE id = :stream_id OR (server = :server AND target = :target AND method = 'none'))
            ORDER BY seq DESC LIMIT :spanned
        ) AS newest
    ) AS unread
    WHERE place % greatest((total + :limit - 1) / :limit, 1) = 0
    ORDER BY seq
    """
)


def after(session: Session, stream: Stream, seq: int) -> list[Numbered]:
    """The requests of the stream after this seq, and those of its server and target without speculation, up
    to a week older than its newest; in order of seq."""
    values = {
        "stream_id": stream.id,
        "server": stream.server,
        "target": stream.target,
        "after": seq,
        "since": stream.last_seen_at - LOOK_BACK,
        "limit": MOST_READ,
        "spanned": MOST_SPANNED,
    }
    return [Numbered(row[0], timed(*row[1:])) for row in session.execute(_AFTER, values)]
