"""Drafts: in service, candidates, retired ones."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Body, Depends, Query
from pydantic import BaseModel, ConfigDict, Field

from driftguard.api.auth import require_key
from driftguard.api.context import Context, get_context
from driftguard.api.cursors import decode_cursor, encode_cursor
from driftguard.api.filters import DraftQuery, Name, refuse_repeated, row_filter
from driftguard.api.openapi import example, problem
from driftguard.errors import Conflict, NotFound
from driftguard.store import announced_drafts, drafts, sources
from driftguard.store.announced_drafts import Effective
from driftguard.store.drafts import Cursor, DraftState

router = APIRouter(prefix="/api/v1/drafts", tags=["drafts"])


class DraftModel(BaseModel):
    model_config = ConfigDict(frozen=True, from_attributes=True)

    server: str
    target: str
    version: str = Field(examples=["3f9c01d2ab44"])
    name: str
    method: str
    state: DraftState
    parent_version: str | None = Field(description="The draft that it was trained from.")
    directory: str | None = Field(description="Its directory; null if unknown, or removed.")
    created_at: datetime
    promoted_at: datetime | None
    retired_at: datetime | None
    retrain_run_id: UUID | None = Field(
        description="The run that trained it; null for a draft from elsewhere."
    )


class DraftPage(BaseModel):
    drafts: list[DraftModel]
    next_cursor: str | None = Field(description="Pass as `cursor` for the next page; null at the end.")


class Announcement(BaseModel):
    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"example": {"server": "chat-eu-1", "draft_version": "3f9c01d2ab44"}},
    )
    server: Name = Field(description="A scraped server, by its name in `sources`.")
    draft_version: Name
    effective: Effective = Field(
        "after_restart",
        description="after_restart: from the next restart of the server that is seen. now: from now on; the "
        "window in which this comes is left out, or is of the draft before where it ends within two seconds. "
        "until_restart: the same until the server restarts with the draft that it was started with.",
    )


class AnnouncedModel(Announcement):
    announced_at: datetime


@router.post(
    "/announce",
    dependencies=[Depends(require_key)],
    responses=problem(NotFound, "there is no scraped server chat-eu-2; there are: chat-eu-1")
    | problem(Conflict, "demo tells the version of its draft itself"),
)
def announce_draft(
    body: Annotated[Announcement, Body()], context: Annotated[Context, Depends(get_context)]
) -> AnnouncedModel:
    """Says which draft version a scraped server serves, as its counters do not. A promotion by
    `retraining.promote_command` or `promote_webhook` does this itself. It replaces an announcement that is
    not in effect yet, and holds until the server's `draft_version` in the settings is another one."""
    with context.database.session() as session:
        known = {
            source.server: source for source in sources.all_sources(session) if source.url != sources.PUSHED
        }
        source = known.get(body.server)
        if source is None:
            there = ", ".join(sorted(known)) or "none"
            raise NotFound(f"there is no scraped server {body.server}; there are: {there}")
        if source.kind == "driftguard":
            raise Conflict(f"{body.server} tells the version of its draft itself")
        at = announced_drafts.announce(session, body.server, body.draft_version, body.effective)
    return AnnouncedModel(**body.model_dump(), announced_at=at)


@router.get("", dependencies=[Depends(refuse_repeated)], responses=example("drafts"))
def list_drafts(
    query: Annotated[DraftQuery, Query()], context: Annotated[Context, Depends(get_context)]
) -> DraftPage:
    """Lists drafts, newest first. By the time at which they became known."""
    after = decode_cursor(query.cursor, Cursor) if query.cursor else None
    with context.database.session() as session:
        rows = drafts.list_page(
            session, limit=query.limit + 1, cursor=after, state=query.state, wanted=row_filter(query)
        )
    shown = rows[: query.limit]
    more = encode_cursor((shown[-1].created_at, shown[-1].id)) if len(rows) > query.limit else None
    return DraftPage(drafts=[DraftModel.model_validate(row) for row in shown], next_cursor=more)
