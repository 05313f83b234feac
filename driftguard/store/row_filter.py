"""Which rows a list or an export reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, TypeVarTuple

import msgspec
from sqlalchemy import ColumnElement, Select, tuple_
from sqlalchemy.orm import InstrumentedAttribute

from driftguard.records import Text

Row = TypeVarTuple("Row")
Column = InstrumentedAttribute[Any]
RowId = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
StoredText = Annotated[Text, msgspec.Meta(pattern=r"^[^\x00]*$")]  # parts of a cursor come from outside


@dataclass(frozen=True, slots=True)
class RowFilter:
    """What is empty or None leaves that open. `until` itself is not wanted any more."""

    streams: Sequence[int] = ()
    segments: Sequence[str] = ()
    kinds: Sequence[str] = ()
    server: str | None = None
    target: str | None = None
    since: datetime | None = None
    until: datetime | None = None

    def at(self, time: Column) -> Iterator[ColumnElement[bool]]:
        """Conditions on the time that the rows are chosen by."""
        if self.since is not None:
            yield time >= self.since
        if self.until is not None:
            yield time < self.until

    def of(self, server: Column, target: Column) -> Iterator[ColumnElement[bool]]:
        """Conditions on whose rows they are."""
        if self.server is not None:
            yield server == self.server
        if self.target is not None:
            yield target == self.target


EVERYTHING = RowFilter()


def newest_first(
    query: Select[*Row], at: Column, row_id: Column, *, limit: int, cursor: tuple[Any, Any] | None
) -> Select[*Row]:
    """One page of a list: at most `limit` rows after the cursor, which is (at, row_id) of the last row of the
    page before."""
    if cursor is not None:
        query = query.where(tuple_(at, row_id) < cursor)
    return query.order_by(at.desc(), row_id.desc()).limit(limit)
