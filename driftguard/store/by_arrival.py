"""Records of one stream in the order in which they arrived, that of `seq`, by the index of both.

Asked for one stream in the order of `seq` alone, PostgreSQL often goes through the records of all streams
instead, on every day that has none of the stream, as before its draft was promoted. Only one index has the
order of both columns; and a list is no constant, for which `stream_id` would be left out of the order.
"""

from __future__ import annotations

from typing import Final

from sqlalchemy import ARRAY, BigInteger, ColumnElement, any_, literal

from driftguard.store.tables import Record

OF_STREAM: Final = "stream_id = ANY(CAST(ARRAY[:stream_id] AS bigint[]))"
OLDEST_FIRST: Final = "stream_id, seq"
NEWEST_FIRST: Final = "stream_id DESC, seq DESC"
oldest_first: Final = (Record.stream_id, Record.seq)
newest_first: Final = (Record.stream_id.desc(), Record.seq.desc())


def of_stream(stream_id: int) -> ColumnElement[bool]:
    """The condition, to be ordered by `oldest_first` or `newest_first`."""
    return Record.stream_id == any_(literal([stream_id], ARRAY(BigInteger)))
