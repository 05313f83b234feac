"""The watch over the goodput of each stream, and the requests that it reads."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from sqlalchemy import or_, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from driftguard.cost.goodput import Numbered
from driftguard.records.documents.goodput import GoodputWatch
from driftguard.store.examination_evidence import LOOK_BACK, timed
from driftguard.store.tables import GoodputWatchRow, Stream

MOST_READ: Final = 5_000  # requests in one look, or a few more; of more, evenly spaced ones are read
MOST_SPANNED: Final = 20_000  # requests that are counted; of more, those in MOST_READ windows are read,
MOST_IN_WINDOW: Final = 20  # at most so many of each, where a stream came in bursts


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


# Of one stream, so that PostgreSQL knows how many it has, and reads them by the right index.
_NEWEST = text(
    """
    SELECT seq FROM records
    WHERE stream_id = :stream_id AND seq > :after AND kind <> 'probe' AND ended_at >= :since
    ORDER BY seq DESC LIMIT :spanned
    """
)
# Stream and seq are compared together, which only the index of both can do: in every window, PostgreSQL would
# otherwise often go through the seqs of all streams.
_IN_WINDOWS = text(
    """
    SELECT seq, ended_at, segment, num_speculative_tokens, concurrency, steps, drafted, accepted, emitted,
           accepted_per_position, output_tokens, time_per_output_token_seconds, kind, first_drafted,
           first_accepted
    FROM (
        SELECT found.*, row_number() OVER (ORDER BY seq) AS place, count(*) OVER () AS total
        FROM unnest(CAST(:stream_ids AS bigint[])) AS stream
        CROSS JOIN unnest(CAST(:starts AS bigint[])) AS start
        CROSS JOIN LATERAL (
            SELECT seq, extract(epoch FROM ended_at)::float8 AS ended_at, segment, num_speculative_tokens,
                   concurrency, steps, drafted, accepted, emitted, accepted_per_position, output_tokens,
                   time_per_output_token_seconds, kind, drafted_per_position[1] AS first_drafted,
                   accepted_per_position[1] AS first_accepted
            FROM records
            WHERE (stream_id, seq) > (stream, start) AND (stream_id, seq) <= (stream, start + :width)
              AND kind <> 'probe' AND ended_at >= :since
            ORDER BY stream_id, seq LIMIT :most
        ) AS found
    ) AS unread
    WHERE place % greatest(total / :limit, 1) = 0
    ORDER BY seq
    """
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
    since = stream.last_seen_at - LOOK_BACK
    stream_ids = [stream.id, *_without_speculation(session, stream)]
    newest: list[int] = []
    for each in stream_ids:
        limits = {"after": seq, "since": since, "spanned": MOST_SPANNED}
        newest += session.scalars(_NEWEST, {**limits, "stream_id": each})
    if not newest:
        return []
    starts, width = _windows(seq, sorted(newest)[-MOST_SPANNED:])
    values = {"stream_ids": stream_ids, "since": since, "starts": starts, "width": width}
    found = session.execute(_IN_WINDOWS, {**values, "most": MOST_IN_WINDOW, "limit": MOST_READ})
    return [Numbered(row[0], timed(*row[1:])) for row in found]


def _without_speculation(session: Session, stream: Stream) -> Sequence[int]:
    """Ids of the other streams of its server and target."""
    query = select(Stream.id).where(
        Stream.id != stream.id,
        Stream.server == stream.server,
        Stream.target == stream.target,
        Stream.method == "none",
    )
    return session.scalars(query).all()


def _windows(after_seq: int, newest: Sequence[int]) -> tuple[list[int], int]:
    """(the seqs before each window, how many it has). `newest`: seqs of the newest MOST_SPANNED requests, or
    of all since `after_seq`, in order."""
    if len(newest) < MOST_SPANNED or after_seq == 0:
        step = -(-len(newest) // MOST_READ)
        return [seq - 1 for seq in newest[step - 1 :: step]], 1
    first, last = newest[0], newest[-1]
    step = -(-(last - after_seq) // MOST_READ)
    return list(range(after_seq, last, step)), -(-(last - first + 1) // MOST_SPANNED)
