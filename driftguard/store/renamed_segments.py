"""What tells whether a segment is an older one under another name: when they were heard, how much, and like
what."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import NamedTuple

from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from driftguard.store.tables import DailyRollup, Rollup

_NEWEST_REQUESTS = 1_000  # per segment


class Heard(NamedTuple):
    """A segment's requests, by the minute."""

    segment: str
    first: datetime
    last: datetime


def heard(session: Session, stream_id: int, since: datetime) -> list[Heard]:
    """The segments of a stream since then, in order of their names."""
    query = select(Rollup.segment, func.min(Rollup.minute), func.max(Rollup.minute)).where(
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


def counts(session: Session, stream_id: int, since: datetime, until: datetime) -> dict[str, int]:
    """segment -> requests in the minutes from `since` on and before `until`."""
    query = select(Rollup.segment, func.sum(Rollup.records)).where(
        Rollup.stream_id == stream_id,
        Rollup.kind == "request",
        Rollup.minute >= since,
        Rollup.minute < until,
    )
    return {segment: int(count) for segment, count in session.execute(query.group_by(Rollup.segment))}


def last_heard(session: Session, stream_id: int, until: datetime) -> datetime | None:
    """The last minute before then with a request of the stream."""
    query = select(func.max(Rollup.minute)).where(
        Rollup.stream_id == stream_id, Rollup.kind == "request", Rollup.minute < until
    )
    return session.scalar(query)


class Likeness(NamedTuple):
    """Of the newest requests of a segment with one K and acceptance rule. Means and variances between
    requests: of accepted / drafted, of the logarithms of the tokens of the answer and of the prompt."""

    segment: str
    num_speculative_tokens: int | None
    acceptance_rule: str
    requests: int
    drafted: int
    mean: float
    variance: float
    answers: int
    answer_mean: float
    answer_variance: float
    prompts: int
    prompt_mean: float
    prompt_variance: float


_LIKENESS = text(
    """
    SELECT segment, num_speculative_tokens, acceptance_rule, count(*), sum(drafted), avg(x),
           coalesce(var_samp(x), 0), count(answer), coalesce(avg(answer), 0), coalesce(var_samp(answer), 0),
           count(prompt), coalesce(avg(prompt), 0), coalesce(var_samp(prompt), 0)
    FROM (
        SELECT segment, num_speculative_tokens, acceptance_rule, drafted, accepted::float8 / drafted AS x,
               ln(nullif(output_tokens, 0)::float8) AS answer, ln(nullif(prompt_tokens, 0)::float8) AS prompt,
               row_number() OVER (PARTITION BY segment ORDER BY seq DESC) AS age
        FROM records
        WHERE stream_id = :stream_id AND kind = 'request' AND drafted > 0 AND ended_at >= :since
          AND segment = ANY(CAST(:segments AS text[]))
    ) AS newest
    WHERE age <= :newest
    GROUP BY segment, num_speculative_tokens, acceptance_rule
    ORDER BY segment, num_speculative_tokens, acceptance_rule
    """
)


def likenesses(
    session: Session, stream_id: int, segments: Collection[str], since: datetime
) -> list[Likeness]:
    given = {
        "stream_id": stream_id,
        "segments": list(segments),
        "since": since,
        "newest": _NEWEST_REQUESTS,
    }
    return [Likeness._make(row) for row in session.execute(_LIKENESS, given)]


_FIRST = text(
    """
    SELECT seq, ended_at FROM records
    WHERE stream_id = :stream_id AND kind = 'request' AND ended_at >= :since
      AND segment = ANY(CAST(:segments AS text[]))
    ORDER BY ended_at, seq LIMIT 1
    """
)


def first_of(
    session: Session, stream_id: int, segments: Collection[str], since: datetime
) -> tuple[int, datetime]:
    """(seq, end) of the first request of segments that were heard since then."""
    given = {"stream_id": stream_id, "segments": list(segments), "since": since}
    seq, at = session.execute(_FIRST, given).one()
    return seq, at
