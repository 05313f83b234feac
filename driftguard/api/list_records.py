"""GET /api/v1/records and /api/v1/rollups: paginated, or exported whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import chain
from typing import Annotated, Any, Final, Literal

import msgspec
from fastapi import APIRouter, Depends, Header, Query, Request, Response
from sqlalchemy.orm import Session

from driftguard.api import openapi_examples
from driftguard.api.context import Context, get_context
from driftguard.api.cursors import decode_cursor, encode_cursor
from driftguard.api.exports import MEDIA_TYPES, Format, encoder, exporting, json_lines
from driftguard.api.filters import RollupQuery, TrafficQuery, refuse_repeated, row_filter
from driftguard.api.openapi import Responses, problem, reference, shown
from driftguard.api.problems import MissingExtra
from driftguard.errors import BadInput
from driftguard.records import AcceptanceRecord
from driftguard.store import export_rows
from driftguard.store.database import Database
from driftguard.store.export_rows import RecordKey, RollupKey, RollupRow
from driftguard.store.rollup_tiers import TIERS

router = APIRouter(prefix="/api/v1", tags=["records"])
AnyContext = Annotated[Context, Depends(get_context)]
Traffic = Annotated[TrafficQuery, Query()]
Accept = Annotated[str, Header(include_in_schema=False)]


def _given(request: Request) -> frozenset[str]:
    """Names of the parameters that are given: with FastAPI below 0.150 the model says so of all."""
    return frozenset(request.query_params)


Given = Annotated[frozenset[str], Depends(_given)]
EXPORT_ROWS: Final = 1_000  # read at once
_FORMATS: Final[dict[str, Format | Literal["json"]]] = {
    "application/json": "json",
    **{media_type: format_ for format_, media_type in MEDIA_TYPES.items()},
}
# The rows that follow a key, at most so many, each with its own key.
Rows = Sequence[tuple[tuple[Any, ...], msgspec.Struct]]
Read = Callable[[Session, Any, int], Rows]


_OF_TIER: Final[dict[str, dict[str, Any]]] = {
    "resolution": {"enum": list(TIERS), "description": "What each row sums."},
    "kept_since": {
        "type": "string",
        "format": "date-time",
        "description": "Records that ended before this may be missing in this resolution; a coarser one "
        "looks back further.",
    },
}


def _answers(
    name: str, row: type[msgspec.Struct], item: dict[str, Any], about: dict[str, dict[str, Any]] | None = None
) -> Responses:
    """`about`: fields of a page beside its rows."""
    properties = {
        name: {"type": "array", "items": reference(row)},
        "next_cursor": {"type": ["string", "null"], "description": "null at the end."},
        **(about or {}),
    }
    page = {"type": "object", "required": list(properties), "properties": properties}
    rows = [msgspec.convert(item, row)]
    lines, csv = (b"".join(write(iter([rows]))).decode() for write in (json_lines, encoder("csv", row)))
    files = {
        "application/json": {"schema": page, **shown(name)},
        MEDIA_TYPES["jsonl"]: {"schema": {"type": "string"}, "example": lines},
        MEDIA_TYPES["csv"]: {"schema": {"type": "string"}, "example": csv},
        MEDIA_TYPES["parquet"]: {"schema": {"type": "string", "format": "binary"}},
    }
    missing = problem(MissingExtra, "format: parquet needs pyarrow; pip install 'driftguard-llm[parquet]'")
    return {200: {"description": "A page, or the export.", "content": files}} | missing


@router.get(
    "/records",
    dependencies=[Depends(refuse_repeated)],
    response_class=Response,
    responses=_answers("records", AcceptanceRecord, openapi_examples.RECORD),
)
def list_records(query: Traffic, context: AnyContext, given: Given, accept: Accept = "") -> Response:
    """Lists acceptance records in the order of arrival. `since` and `until` are times at which they ended.

    As `jsonl` they are the interchange format: `driftguard replay` reads it, and `POST /api/v1/records`
    accepts it. `draft` is the name with which the stream was first seen; segments beyond the limit are
    `other`.
    """
    chosen = row_filter(query)
    with context.database.session() as session:
        newest = export_rows.newest_seq(session)  # an export ends, however much arrives meanwhile

    def read(session: Session, after: RecordKey | None, limit: int) -> Rows:
        return export_rows.records(session, chosen, after=after, limit=limit, up_to=newest)

    return _answer("records", query, given, accept, context, read, RecordKey, AcceptanceRecord)


@router.get(
    "/rollups",
    dependencies=[Depends(refuse_repeated)],
    response_class=Response,
    responses=_answers("rollups", RollupRow, openapi_examples.ROLLUP, _OF_TIER),
)
def list_rollups(
    query: Annotated[RollupQuery, Query()], context: AnyContext, given: Given, accept: Accept = ""
) -> Response:
    """Lists sums per segment and minute (or hour, or day: `resolution`). Oldest first, by their first minute.

    They are kept for longer than records, per minute for `retention.minute_rollups_days` (35), per hour for
    `retention.hourly_rollups_days` (400), per day for `retention.rollups_days` (1,830). Each resolution has
    every record that ended within its days: ask for a coarser one to look back further.
    """
    chosen, tier = row_filter(query), TIERS[query.resolution]
    kept_since = tier.kept_since(datetime.now(UTC), context.settings.retention)

    def read(session: Session, after: RollupKey | None, limit: int) -> Rows:
        return export_rows.rollups(session, tier, chosen, after=after, limit=limit)

    about = {"resolution": query.resolution, "kept_since": kept_since}
    return _answer("rollups", query, given, accept, context, read, RollupKey, RollupRow, about)


def _answer(
    name: str,
    query: TrafficQuery,
    given: frozenset[str],
    accept: str,
    context: Context,
    read: Read,
    key: type[tuple[Any, ...]],
    row: type[msgspec.Struct],
    about: Mapping[str, object] | None = None,
) -> Response:
    format_ = query.format or _accepted(accept)
    if format_ == "json":
        return _page(name, query, context.database, read, key, about or {})
    for parameter in sorted(given & {"limit", "cursor"}):
        raise BadInput(
            f"{parameter}: an export is not paginated; leave it out, or ask for format=json", field=parameter
        )
    encode = encoder(format_, row)

    def begun() -> Iterator[bytes]:
        pages = _pages(context.database, read)
        return encode(chain([next(pages)], pages))

    return exporting(
        context.exports,
        begun,
        media_type=MEDIA_TYPES[format_],
        headers={"Content-Disposition": f'attachment; filename="{name}.{format_}"'},
    )


def _accepted(accept: str) -> Format | Literal["json"]:
    for media_type in accept.lower().split(","):
        if found := _FORMATS.get(media_type.partition(";")[0].strip()):
            return found
    return "json"


def _page(
    name: str,
    query: TrafficQuery,
    database: Database,
    read: Read,
    key: type[tuple[Any, ...]],
    about: Mapping[str, object],
) -> Response:
    after = decode_cursor(query.cursor, key) if query.cursor else None
    with database.session() as session:
        rows = read(session, after, query.limit + 1)
    shown = rows[: query.limit]
    more = encode_cursor(shown[-1][0]) if len(rows) > query.limit else None
    body = {name: [row for _, row in shown], "next_cursor": more, **about}
    return Response(msgspec.json.encode(body), media_type="application/json")


def _pages(database: Database, read: Read) -> Iterator[list[msgspec.Struct]]:
    """At least one, possibly empty; each in a transaction of its own, as a slow reader must not hold one."""
    after = None
    while True:
        with database.session() as session:
            export_rows.walk_in_order(session)
            rows = read(session, after, EXPORT_ROWS)
        yield [row for _, row in rows]
        if len(rows) < EXPORT_ROWS:
            return
        after = rows[-1][0]
