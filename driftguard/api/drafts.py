"""Drafts: in service, candidates, retired ones."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, ConfigDict, Field

from driftguard.api.context import Context, get_context
from driftguard.api.cursors import decode_cursor, encode_cursor
from driftguard.api.filters import DraftQuery, refuse_repeated, row_filter
from driftguard.api.openapi import example
from driftguard.store import drafts
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


@router.get("", dependencies=[Depends(refuse_repeated)], responses=example("drafts"))
def list_drafts(
    query: Annotated[DraftQuery, Query()], context: Annotated[Context, Depends(get_context)]
) -> DraftPage:
    """Newest first, by the time at which they became known."""
    after = decode_cursor(query.cursor, Cursor) if query.cursor else None
    with context.database.session() as session:
        rows = drafts.list_page(
            session, limit=query.limit + 1, cursor=after, state=query.state, wanted=row_filter(query)
        )
    shown = rows[: query.limit]
    more = encode_cursor((shown[-1].created_at, shown[-1].id)) if len(rows) > query.limit else None
    return DraftPage(drafts=[DraftModel.model_validate(row) for row in shown], next_cursor=more)
