"""GET /api/v1/streams: the status of all streams, paginated."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.concurrency import run_in_threadpool
from pydantic import Field
from sqlalchemy.orm import Session

from driftguard.api.context import Context, get_context
from driftguard.api.cursors import decode_cursor, encode_cursor
from driftguard.api.filters import Name, Pages, Servers, StreamId, refuse_repeated
from driftguard.api.openapi import example, problem
from driftguard.api.status import Places, models_of
from driftguard.api.status_models import FrozenModel, StreamStatusModel
from driftguard.errors import BadInput, NotFound
from driftguard.metrics.labels import StreamVerdict
from driftguard.status import stream_list
from driftguard.status.stream_list import Choice, Key, Order
from driftguard.status.verdict import Standing, standings
from driftguard.store import sources, streams

router = APIRouter(prefix="/api/v1/streams", tags=["status"])
AnyContext = Annotated[Context, Depends(get_context)]
_NO_STREAM: Final = problem(NotFound, "there is no stream 7")


class StreamQuery(Pages, Servers):
    """Streams, by their current status."""

    q: Name | None = Field(
        None,
        description="Part of the name of a server, target, draft, method or segment; not case-sensitive.",
        examples=["chat-eu"],
    )
    verdict: StreamVerdict | None = None
    method: Name | None = Field(None, examples=["draft_model"])
    in_service: bool | None = None
    sort: Order = Field(
        "verdict",
        description="verdict: the worst first; last_seen: the newest; cost: the largest loss of tokens per "
        "second; server: by name.",
    )


class StreamPage(FrozenModel):
    streams: list[StreamStatusModel]
    matching: int = Field(description="Matching streams, on all pages of the list together.", examples=[1])
    next_cursor: str | None = Field(description="Pass as `cursor` for the next page; null at the end.")


@router.get("", dependencies=[Depends(refuse_repeated)], responses=example("streams"))
async def list_streams(
    query: Annotated[StreamQuery, Query()], context: AnyContext, request: Request
) -> StreamPage:
    """Lists streams, each with its verdict and the numbers behind it. A stream whose place in the order
    changes between two pages may be on both or on neither: `sort=server` has every stream once."""
    async with context.listing.taken(request):
        return await run_in_threadpool(_list, query, context)


def _list(query: StreamQuery, context: Context) -> StreamPage:
    now = datetime.now(UTC)
    choice = Choice(query.q, query.verdict, query.server, query.target, query.method, query.in_service)
    with context.database.session() as session:
        found = standings(session, now, usual=context.usual_silences)
        chosen = matching(session, found, choice)
        shown, last = stream_list.page(chosen, query.sort, query.limit, decode(query.cursor, query.sort))
        return StreamPage(
            streams=models_of(session, now, shown, _places(session, context)),
            matching=len(chosen),
            next_cursor=encode_cursor(last) if last else None,
        )


@router.get("/{stream_id}", responses=example("stream") | _NO_STREAM)
def get_stream(stream_id: Annotated[StreamId, Path()], context: AnyContext) -> StreamStatusModel:
    """Shows one stream, its verdict and the numbers behind it. 404: no such stream."""
    now = datetime.now(UTC)
    with context.database.session() as session:
        stream = streams.get_stream(session, stream_id)
        if stream is None:
            raise NotFound(f"there is no stream {stream_id}")
        related = standings(
            session,
            now,
            streams.of_server(session, stream.server),
            usual=context.usual_silences,
        )
        own = [item for item in related if item.stream.id == stream_id]
        (model,) = models_of(session, now, own, _places(session, context))
        return model


def _places(session: Session, context: Context) -> Places:
    return Places.of(context, sources.all_sources(session))


def matching(session: Session, found: list[Standing], choice: Choice) -> list[Standing]:
    with_segment = streams.with_segment_like(session, choice.text) if choice.text else ()
    return stream_list.matching(found, choice, with_segment)


def decode(cursor: str | None, order: Order) -> Key | None:
    """Raises BadInput: not a cursor of a list in that order."""
    if not cursor:
        return None
    after = decode_cursor(cursor, Key)
    if after.order != order:
        raise BadInput(
            f"cursor: belongs to a list sorted by {after.order}, not by {order}; begin with the first page",
            field="cursor",
        )
    return after
