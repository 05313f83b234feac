"""Trying a held stream again: one at whose records the detector failed."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated

from fastapi import APIRouter, Depends, Path
from pydantic import Field

from driftguard.api.auth import require_key
from driftguard.api.context import Context, get_context
from driftguard.api.filters import StreamId
from driftguard.api.openapi import example, problem
from driftguard.api.status_models import FrozenModel
from driftguard.errors import Conflict, NotFound
from driftguard.store import folding, streams

router = APIRouter(prefix="/api/v1", tags=["status"])


class HeldStreamModel(FrozenModel):
    """A stream that the fold leaves out, because its records raised an error."""

    stream_id: int
    since: datetime
    failures: int = Field(description="Failures in a row.")
    reason: str = Field(description="Of the last failure.")
    records_behind: int = Field(description="Its records that wait for the detector.")
    set_aside_at: datetime | None = Field(description="null: it is still tried again automatically.")
    next_try_at: datetime | None


@router.post(
    "/streams/{stream_id}/retry",
    dependencies=[Depends(require_key)],
    responses=example("held_stream")
    | problem(NotFound, "there is no stream 7")
    | problem(Conflict, "stream 7 is folded like every other: there is nothing to try again"),
)
def retry_stream(
    stream_id: Annotated[StreamId, Path()], context: Annotated[Context, Depends(get_context)]
) -> HeldStreamModel:
    """Reads the records of a stream that was set aside again. The detector does so within seconds. Where it
    fails again, the stream stays set aside. 404: no such stream. 409: it is not held."""
    with context.database.session() as session:
        if streams.get_stream(session, stream_id) is None:
            raise NotFound(f"there is no stream {stream_id}")
        held = folding.try_at(session, stream_id, datetime.now(UTC))
        if held is None:
            raise Conflict(f"stream {stream_id} is folded like every other: there is nothing to try again")
        return HeldStreamModel.model_validate(held)
