"""How long sources usually were silent, from the minutes in which their records ended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from sqlalchemy import TextClause, text
from sqlalchemy.orm import Session

# Each stream's minutes by themselves: for several at once, the database would walk the minutes of all.
# A span counts the silences that begin in it, so the first active minute after it belongs to it too.
_LONGEST = text(
    """
    WITH spans AS (
        SELECT source, stream_id, last, number, last - earliest AS first_at, last - latest AS last_at
        FROM unnest(CAST(:sources AS int[]), CAST(:stream_ids AS bigint[]), CAST(:lasts AS timestamptz[]))
               AS asked (source, stream_id, last),
             unnest(CAST(:earliest AS interval[]), CAST(:latest AS interval[]))
               WITH ORDINALITY AS span (earliest, latest, number)
    ), silences AS (
        SELECT source, last_at, minute,
               lag(minute) OVER (PARTITION BY source, number ORDER BY minute) AS began
        FROM spans, LATERAL (
            SELECT minute FROM rollups_1m
            WHERE rollups_1m.stream_id = spans.stream_id AND kind <> 'probe'
              AND minute BETWEEN first_at AND last_at
            UNION ALL
            (SELECT minute FROM rollups_1m
             WHERE rollups_1m.stream_id = spans.stream_id AND kind <> 'probe'
               AND minute > last_at AND minute <= last
             ORDER BY minute LIMIT 1)
        ) AS active
    )
    SELECT source, max(minute - began) AS silence FROM silences WHERE began <= last_at GROUP BY source
    """
)


@dataclass(frozen=True, slots=True)
class Source:
    """`last`: when the newest record of its streams ended."""

    stream_ids: tuple[int, ...]
    last: datetime


def longest(
    session: Session, asked: Sequence[Source], spans: Mapping[timedelta, timedelta]
) -> list[timedelta]:
    """The longest silence of each that began in one of the `spans`, an active minute being the unit; zero
    where there was none. `spans`: how long before the last record each begins -> and ends. Probes are no
    traffic. One statement for all."""
    if not asked:
        return []
    rows = session.execute(*statement(asked, spans))
    found: dict[int, timedelta] = {row.source: row.silence for row in rows}
    return [found.get(number, timedelta()) for number in range(len(asked))]


def statement(
    asked: Sequence[Source], spans: Mapping[timedelta, timedelta]
) -> tuple[TextClause, dict[str, Any]]:
    """With its parameters."""
    rows = [(number, one, source.last) for number, source in enumerate(asked) for one in source.stream_ids]
    numbers, stream_ids, lasts = zip(*rows, strict=True)
    return _LONGEST, {
        "sources": list(numbers),
        "stream_ids": list(stream_ids),
        "lasts": list(lasts),
        "earliest": list(spans),
        "latest": list(spans.values()),
    }
