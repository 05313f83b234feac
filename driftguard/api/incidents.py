"""Incidents: list, one, acknowledge, resolve, accept the new level."""

from __future__ import annotations

from base64 import urlsafe_b64decode, urlsafe_b64encode
from datetime import UTC, datetime
from typing import Annotated, Literal
from uuid import UUID

from fastapi import APIRouter, Depends, Query
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from driftguard.api.auth import require_key
from driftguard.api.context import Context, get_context
from driftguard.api.models import ExampleModel, IncidentDetail, IncidentModel, IncidentPage
from driftguard.errors import BadInput
from driftguard.incidents import State
from driftguard.store import captured_traffic, incidents, notifications
from driftguard.store.incidents import Cursor
from driftguard.store.tables import Incident

router = APIRouter(prefix="/api/v1/incidents", tags=["incidents"])
AnyContext = Annotated[Context, Depends(get_context)]


class Reason(BaseModel):
    """Why the incident changes; it is kept with the transition."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"example": {"reason": "looking at it; new tenant went live"}}
    )
    reason: str = Field(min_length=1, max_length=2_000)


@router.get("")
def list_incidents(
    context: AnyContext,
    limit: Annotated[int, Query(ge=1, le=500)] = 50,
    cursor: Annotated[str | None, Query(description="`next_cursor` of the page before.")] = None,
    state: Annotated[
        Literal["open", "acknowledged", "mitigating", "resolved", "unresolved"] | None,
        Query(description="unresolved: any but resolved."),
    ] = None,
    stream: Annotated[int | None, Query(description="Id of a stream.")] = None,
) -> IncidentPage:
    """Newest first."""
    after = decode_cursor(cursor) if cursor else None
    with context.database.session() as session:
        rows = incidents.page(session, limit=limit + 1, cursor=after, state=state, stream_id=stream)
        shown = rows[:limit]
        more = encode_cursor(shown[-1][0].opened_at, shown[-1][0].id) if len(rows) > limit else None
        return IncidentPage(incidents=[IncidentModel.of(*row) for row in shown], next_cursor=more)


@router.get("/{incident_id}")
def get_incident(incident_id: UUID, context: AnyContext) -> IncidentDetail:
    """One incident with its transitions and notifications."""
    with context.database.session() as session:
        return detail(session, incident_id)


@router.post("/{incident_id}/acknowledge", dependencies=[Depends(require_key)])
def acknowledge(incident_id: UUID, body: Reason, context: AnyContext) -> IncidentDetail:
    """Somebody looks at it. 409 with the legal next states when it cannot be acknowledged."""
    return _move(context, incident_id, "acknowledged", body.reason)


@router.post("/{incident_id}/resolve", dependencies=[Depends(require_key)])
def resolve(incident_id: UUID, body: Reason, context: AnyContext) -> IncidentDetail:
    """It is over; the detector starts looking for the next change. 409 when it is resolved already."""
    return _move(context, incident_id, "resolved", body.reason)


@router.post("/{incident_id}/accept", dependencies=[Depends(require_key)])
def accept(incident_id: UUID, body: Reason, context: AnyContext) -> IncidentDetail:
    """The new level is normal: resolves the incident, and with the stream's next record the detector learns
    the baselines of its segments anew, beginning at the change point where it can. 409 when the incident is
    resolved already, or was opened by something else than the detector (a new target)."""
    with context.database.session() as session:
        incidents.accept_level(session, incident_id, body.reason, datetime.now(UTC))
        return detail(session, incident_id)


def _move(context: Context, incident_id: UUID, to_state: State, reason: str) -> IncidentDetail:
    with context.database.session() as session:
        incidents.move(session, incident_id, to_state, reason, datetime.now(UTC))
        return detail(session, incident_id)


def detail(session: Session, incident_id: UUID) -> IncidentDetail:
    incident, stream = incidents.find(session, incident_id)
    return IncidentDetail.with_history(
        incident,
        stream,
        list(incidents.transitions(session, incident_id)),
        list(notifications.of_incident(session, incident_id)),
        _examples(session, incident),
    )


def _examples(session: Session, incident: Incident) -> list[ExampleModel]:
    """Token ids of the diagnosis's examples that are still kept: captures have a retention of their own."""
    named = [UUID(record_id) for record_id in (incident.diagnosis or {}).get("examples", ())]
    return [
        ExampleModel(record_id=row.record_id, prompt_token_ids=row.prompt_token_ids)
        for row in captured_traffic.token_ids(session, named)
    ]


def encode_cursor(opened_at: datetime, incident_id: UUID) -> str:
    return urlsafe_b64encode(f"{opened_at.isoformat()}|{incident_id}".encode()).decode().rstrip("=")


def decode_cursor(text: str) -> Cursor:
    """Raises BadInput."""
    try:
        decoded = urlsafe_b64decode(text + "=" * (-len(text) % 4)).decode()
        at, _, incident_id = decoded.partition("|")
        opened_at = datetime.fromisoformat(at)
        return Cursor(opened_at.astimezone(UTC), UUID(incident_id))
    except ValueError:
        raise BadInput("cursor: not a cursor of this API; take next_cursor of the page before") from None
