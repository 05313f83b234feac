"""Records of one stream in the order in which they arrived, that of `seq`, by the index of both.

Asked for one stream in the order of `seq` alone, PostgreSQL often goes through the records of all streams
instead, on every day that has none of the stream, as before its draft was promoted. Only one index has the
order of both columns; and a list is no constant, for which `stream_id` would be left out of the order.
"""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime
from typing import Any, Final, NamedTuple

from sqlalchemy import ARRAY, BigInteger, ColumnElement, any_, literal

from driftguard.store.tables import Record

MOST_READ: Final = 1_000_000  # newest records of a stream, in all segments: a busy one has millions a week
OF_STREAM: Final = "stream_id = ANY(CAST(ARRAY[:stream_id] AS bigint[]))"
OLDEST_FIRST: Final = "stream_id, seq"
NEWEST_FIRST: Final = "stream_id DESC, seq DESC"
oldest_first: Final = (Record.stream_id, Record.seq)
newest_first: Final = (Record.stream_id.desc(), Record.seq.desc())


def newest_records(condition: str) -> str:
    """SQL of a table "read": the newest :most_read records of :stream_id and :kind. What is looked for there
    in vain, as more requests of a rare segment than there are, is not looked for in all that are kept."""
    return f"""(
        SELECT * FROM records WHERE {OF_STREAM} AND kind = :kind AND {condition}
        ORDER BY {NEWEST_FIRST} LIMIT :most_read
    ) AS read"""  # noqa: S608 (constants only)


class LeftOut(NamedTuple):
    """Of a segment what arrived from the seq `first` on and ended at `until` or before; None: all of it."""

    segment: str
    first: int
    until: datetime | None


# A condition of the table "read", whose parameters `left_out` gives.
NOT_LEFT_OUT: Final = """NOT EXISTS (
        SELECT FROM unnest(CAST(:out_segments AS text[]), CAST(:out_firsts AS bigint[]),
                           CAST(:out_untils AS timestamptz[])) AS left_out(segment, first, until)
        WHERE left_out.segment = read.segment AND left_out.first <= read.seq
          AND (left_out.until IS NULL OR read.ended_at <= left_out.until)
    )"""


def left_out(without: Collection[LeftOut]) -> dict[str, list[Any]]:
    return {
        "out_segments": [one.segment for one in without],
        "out_firsts": [one.first for one in without],
        "out_untils": [one.until for one in without],
    }


def of_stream(stream_id: int) -> ColumnElement[bool]:
    """The condition, to be ordered by `oldest_first` or `newest_first`."""
    return Record.stream_id == any_(literal([stream_id], ARRAY(BigInteger)))
