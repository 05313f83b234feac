"""Query parameters of lists and exports: a name means the same everywhere, and unknown names are refused."""

from __future__ import annotations

import re
from collections import Counter
from datetime import datetime
from typing import Annotated, Literal

from fastapi import Request
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    field_validator,
)

from driftguard.errors import BadInput
from driftguard.incident_lifecycle import State
from driftguard.records import Kind
from driftguard.store.drafts import DraftState
from driftguard.store.retrain_runs import RunState
from driftguard.store.rollup_tiers import Resolution
from driftguard.store.row_filter import RowFilter


def without_nul(text: str) -> str:
    if "\x00" in text:
        raise ValueError("holds a NUL character, which no text field may hold")
    return text


Name = Annotated[
    str,
    Field(min_length=1, max_length=256, json_schema_extra={"pattern": r"^[^\x00]*$"}),
    AfterValidator(without_nul),
]


def _as_date(value: object) -> object:
    if isinstance(value, str) and not _DATE.match(value):  # else a number would mean seconds since 1970
        raise ValueError(_NO_TIME)
    return value


def _with_offset(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError(_NO_TIME)
    return value


_DATE = re.compile(r"\d{4}-")
_NO_TIME = "should be a date and time with UTC offset, as in 2026-11-01T00:00:00Z"
Time = Annotated[datetime, BeforeValidator(_as_date), AfterValidator(_with_offset)]
StreamId = Annotated[int, Field(ge=1, lt=2**63)]


_REPEATABLE = ("stream", "segment", "kind")


def refuse_repeated(request: Request) -> None:
    """FastAPI dependency of every list: otherwise one value of a repeated parameter would be silently
    ignored.

    Raises BadInput.
    """
    given = Counter(name for name, _ in request.query_params.multi_items())
    for name, times in given.items():
        if times > 1 and name not in _REPEATABLE:
            raise BadInput(f"{name}: is given {times} times; it may be given once", field=name)


class Pages(BaseModel):
    """Pagination of a list."""

    model_config = ConfigDict(extra="forbid")
    limit: int = Field(50, ge=1, le=500, description="Rows of a page.")
    cursor: str | None = Field(None, description="`next_cursor` of the page before.")


class StatusQuery(BaseModel):
    """Query of the status."""

    model_config = ConfigDict(extra="forbid")
    limit: int = Field(
        500, ge=1, le=500, description="Most streams to return; GET /api/v1/streams has all, paginated."
    )


class TimeRange(BaseModel):
    """A range of time; the operation says which time of a row is compared."""

    since: Time | None = Field(
        None, description="From here on, with UTC offset.", examples=["2026-11-01T00:00:00Z"]
    )
    until: Time | None = Field(
        None, description="Before here, with UTC offset.", examples=["2026-11-02T00:00:00Z"]
    )

    @field_validator("until")
    @classmethod
    def _after_since(cls, until: datetime | None, info: ValidationInfo) -> datetime | None:
        since = info.data.get("since")
        if until is not None and since is not None and until <= since:
            raise ValueError(f"is not after since ({since.isoformat()})")
        return until


class Segments(BaseModel):
    segment: list[Name] = Field([], description="Any of these; may be repeated.", examples=[["support-de"]])


class Servers(BaseModel):
    server: Name | None = Field(None, examples=["chat-eu-1"])
    target: Name | None = Field(None, examples=["Qwen3-32B"])


class Streams(BaseModel):
    stream: list[StreamId] = Field(
        [], description="Id of a stream (see the status), any of these; may be repeated.", examples=[[1]]
    )


class IncidentQuery(Pages, TimeRange, Segments, Servers, Streams):
    """Incidents, by the time at which they were opened."""

    state: Literal[State, "unresolved"] | None = Field(None, description="unresolved: any but resolved.")


class DraftQuery(Pages, TimeRange, Servers):
    """Drafts, by the time at which they became known."""

    state: DraftState | None = None


class RunQuery(Pages, TimeRange, Servers):
    """Retraining runs, by the time at which they started."""

    state: Literal[RunState, "running"] | None = Field(None, description="running: any that has not ended.")


class CaptureQuery(TimeRange, Segments, Servers):
    """Captured requests, by the time at which they were captured."""

    model_config = ConfigDict(extra="forbid")


class TrafficQuery(Pages, TimeRange, Segments, Servers, Streams):
    """Records and rollups: a paginated list, or an export of all matching rows."""

    kind: list[Kind] = Field([], description="Any of these; may be repeated.", examples=[["request"]])
    format: Literal["json", "jsonl", "csv", "parquet"] | None = Field(
        None,
        description="json: one page of the list. jsonl, csv, parquet: all matching rows, streamed; these "
        "accept neither limit nor cursor. Left out, the Accept header decides between them.",
    )


class RollupQuery(TrafficQuery):
    """Rollups, by the first minute of each."""

    resolution: Resolution = Field(
        "minute", description="What each row sums: a minute, an hour or a day of UTC."
    )


_WANTED = {"stream": "streams", "segment": "segments", "kind": "kinds"}


def row_filter(query: TimeRange) -> RowFilter:
    """The part of the query that selects rows: without limit, cursor, state, format and resolution."""
    names = ("stream", "segment", "kind", "server", "target", "since", "until")
    return RowFilter(
        **{_WANTED.get(name, name): getattr(query, name) for name in names if hasattr(query, name)}
    )
