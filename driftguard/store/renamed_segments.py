"""What tells whether a segment is an older one under another name: when they were heard, how much, and like
what."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from driftguard.store.by_arrival import (
    MOST_READ,
    NOT_LEFT_OUT,
    LeftOut,
    left_out,
    newest_first,
    newest_records,
    of_stream,
)
from driftguard.store.tables import DailyRollup, Record, Rollup, Segment

_NEWEST_REQUESTS = 1_000  # per segment


class Heard(NamedTuple):
    """A segment, and the minute of its first request."""

    segment: str
    first: datetime


def heard(session: Session, stream_id: int, since: datetime) -> list[Heard]:
    """The segments of a stream since then, in order of their names."""
    query = select(Rollup.segment, func.min(Rollup.minute)).where(
        Rollup.stream_id == stream_id, Rollup.kind == "request", Rollup.minute >= since
    )
    return [Heard(*row) for row in session.execute(query.group_by(Rollup.segment).order_by(Rollup.segment))]


def known_before(session: Session, stream_id: int, until: datetime) -> set[str]:
    """Segments that were heard on a day that ended before then."""
    query = select(DailyRollup.segment).where(
        DailyRollup.stream_id == stream_id,
        DailyRollup.kind == "request",
        DailyRollup.minute < until.replace(hour=0, minute=0, second=0, microsecond=0),
    )
    return set(session.scalars(query.distinct()))


def appeared(session: Session, stream_id: int) -> dict[str, datetime]:
    """segment -> when its first record arrived, by the sidecar's clock."""
    query = select(Segment.segment, Segment.first_seen_at).where(Segment.stream_id == stream_id)
    return {row.segment: row.first_seen_at for row in session.execute(query)}


class Arrived(NamedTuple):
    """A request. `ended_at`: by the server's clock."""

    seq: int
    segment: str
    ended_at: datetime


def newest(session: Session, stream_id: int, most: int) -> list[Arrived]:
    """The newest requests of a stream, at most so many, in the order in which they arrived."""
    query = (
        select(Record.seq, Record.segment, Record.ended_at)
        .where(of_stream(stream_id), Record.kind == "request")
        .order_by(*newest_first)
        .limit(most)
    )
    return [Arrived(*row) for row in reversed(session.execute(query).all())]


class Likeness(NamedTuple):
    """Of the newest requests of a segment with one K, acceptance rule and verification. Means and variances
    between requests: of accepted / drafted, of the same of the first draft token where it is told, of the
    logarithms of the tokens of the answer and of the prompt."""

    segment: str
    num_speculative_tokens: int | None
    acceptance_rule: str
    verification: str
    requests: int
    drafted: int
    mean: float
    variance: float
    firsts: int
    first_mean: float
    first_variance: float
    answers: int
    answer_mean: float
    answer_variance: float
    prompts: int
    prompt_mean: float
    prompt_variance: float


_LIKENESS = text(
    f"""
    SELECT segment, num_speculative_tokens, acceptance_rule, verification, count(*), sum(drafted),
           avg(x), coalesce(var_samp(x), 0), count(of_first), coalesce(avg(of_first), 0),
           coalesce(var_samp(of_first), 0), count(answer), coalesce(avg(answer), 0),
           coalesce(var_samp(answer), 0), count(prompt), coalesce(avg(prompt), 0),
           coalesce(var_samp(prompt), 0)
    FROM (
        SELECT segment, num_speculative_tokens, acceptance_rule, verification, drafted,
               accepted::float8 / drafted AS x,
               accepted_per_position[1]::float8 / nullif(drafted_per_position[1], 0) AS of_first,
               ln(nullif(output_tokens, 0)::float8) AS answer, ln(nullif(prompt_tokens, 0)::float8) AS prompt,
               row_number() OVER (PARTITION BY segment ORDER BY seq DESC) AS age
        FROM (
            SELECT until, array_agg(name) AS names
            FROM unnest(CAST(:segments AS text[]), CAST(:untils AS bigint[])) AS one(name, until)
            GROUP BY until
        ) AS asked CROSS JOIN LATERAL {newest_records("seq < asked.until AND ended_at >= :since")}
        WHERE drafted > 0 AND segment = ANY(names) AND {NOT_LEFT_OUT}
    ) AS newest
    WHERE age <= :newest
    GROUP BY segment, num_speculative_tokens, acceptance_rule, verification
    ORDER BY segment, num_speculative_tokens, acceptance_rule, verification
    """  # noqa: S608 (constants only)
)


def likenesses(
    session: Session,
    stream_id: int,
    until: Mapping[str, int],
    since: datetime,
    without: Collection[LeftOut] = (),
) -> list[Likeness]:
    """`until`: of these segments, each of its requests before this seq, among the newest MOST_READ of all
    segments then, `without` some of them."""
    given = {
        "stream_id": stream_id,
        "segments": list(until),
        "untils": list(until.values()),
        "since": since,
        "kind": "request",
        "newest": _NEWEST_REQUESTS,
        "most_read": MOST_READ,
        **left_out(without),
    }
    return [Likeness._make(row) for row in session.execute(_LIKENESS, given)]
