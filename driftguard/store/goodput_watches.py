"""The watch over the goodput of each stream, and the requests that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Final

from sqlalchemy import select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from driftguard.cost.goodput import Numbered
from driftguard.records.documents.goodput import GoodputWatch
from driftguard.store.by_arrival import OLDEST_FIRST
from driftguard.store.examination_evidence import LOOK_BACK, timed
from driftguard.store.streams import is_to_be_seen_again
from driftguard.store.tables import GoodputWatchRow, Stream

MOST_READ: Final = 5_000  # requests in one look, or a few more; of more, evenly spaced ones are read
MOST_SPANNED: Final = 20_000  # requests that are counted; of more, those in MOST_READ windows are read,
MOST_IN_WINDOW: Final = 20  # at most so many of each, where a stream came in bursts


def due(session: Session, every: timedelta, now: datetime, *, limit: int) -> list[Stream]:
    """Streams with drafts and traffic since their last look, `every` so long, and those that a clock which
    was ahead has looked at; the longest unseen first."""
    query = (
        select(Stream)
        .outerjoin(GoodputWatchRow, GoodputWatchRow.stream_id == Stream.id)
        .where(
            Stream.method != "none",
            Stream.traffic_arrived_at.is_not(None),
            is_to_be_seen_again(GoodputWatchRow.looked_at, every, now),
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


_COLUMNS: Final = """
    seq, extract(epoch FROM ended_at)::float8 AS ended_at, segment, num_speculative_tokens, concurrency,
    steps, drafted, accepted, emitted, accepted_per_position, output_tokens, time_per_output_token_seconds,
    kind, drafted_per_position[1] AS first_drafted, accepted_per_position[1] AS first_accepted
"""
_THINNED: Final = """
    SELECT * FROM (
        SELECT *, row_number() OVER (ORDER BY seq) AS place, count(*) OVER () AS total FROM found
    ) AS unread
"""
_NEWEST = text(
    f"""
    WITH found AS (
        SELECT {_COLUMNS} FROM records
        WHERE seq > :after AND kind <> 'probe' AND ended_at >= :since AND stream_id = ANY(:stream_ids)
        ORDER BY seq DESC LIMIT :spanned
    ) {_THINNED}
    WHERE place % greatest((total + :limit - 1) / :limit, 1) = 0
    ORDER BY seq
    """  # noqa: S608 (constants only)
)
# Each window by the index of stream and seq, as in driftguard.store.by_arrival.
_IN_WINDOWS = text(
    f"""
    WITH found AS (
        SELECT each.* FROM unnest(CAST(:stream_ids AS bigint[])) AS stream
        CROSS JOIN unnest(CAST(:starts AS bigint[])) AS start
        CROSS JOIN LATERAL (
            SELECT {_COLUMNS} FROM records
            WHERE stream_id = ANY(ARRAY[stream]) AND seq > start AND seq <= start + :width
              AND kind <> 'probe' AND ended_at >= :since
            ORDER BY {OLDEST_FIRST} LIMIT :most
        ) AS each
    ) {_THINNED}
    WHERE place % greatest(total / :limit, 1) = 0
    ORDER BY seq
    """  # noqa: S608 (constants only)
)


def after(session: Session, stream: Stream, seq: int) -> list[Numbered]:
    """The requests of the stream after this seq, and those of its server and target without speculation, up
    to a week older than its newest; in order of seq.

    Of more than MOST_READ, evenly spaced ones. Of MOST_SPANNED or more, which are not counted, those in
    windows of as many seqs as hold one request on average, evenly spaced from this seq to the newest: each
    request is as likely to be read as any other, and fewer than 2 MOST_READ are. The next request after
    evenly spaced seqs would more likely be one that came after a pause of its stream. Where nothing was read
    yet, only of the newest MOST_SPANNED.
    """
    values = {
        "stream_ids": [stream.id, *_without_speculation(session, stream)],
        "since": stream.last_seen_at - LOOK_BACK,
        "limit": MOST_READ,
    }
    found = session.execute(_NEWEST, {**values, "after": seq, "spanned": MOST_SPANNED}).all()
    if seq > 0 and found and found[0].total >= MOST_SPANNED:
        first, last = found[0].seq, found[-1].seq
        windows = {
            "starts": list(range(seq, last, -(-(last - seq) // MOST_READ))),
            "width": -(-(last - first + 1) // MOST_SPANNED),
            "most": MOST_IN_WINDOW,
        }
        found = session.execute(_IN_WINDOWS, {**values, **windows}).all()
    return [Numbered(row[0], timed(*row[1:-2])) for row in found]


def _without_speculation(session: Session, stream: Stream) -> Sequence[int]:
    """Ids of the other streams of its server and target."""
    query = select(Stream.id).where(
        Stream.id != stream.id,
        Stream.server == stream.server,
        Stream.target == stream.target,
        Stream.method == "none",
    )
    return session.scalars(query).all()
