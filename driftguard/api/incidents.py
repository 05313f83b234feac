"""Incidents: list, one, acknowledge, resolve, accept the new level."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Request
from pydantic import AfterValidator, BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from driftguard.alerting import destination
from driftguard.api import openapi_examples
from driftguard.api.actions import ActionModel
from driftguard.api.auth import is_allowed, require_key
from driftguard.api.context import Context, get_context
from driftguard.api.cursors import decode_cursor, encode_cursor
from driftguard.api.filters import IncidentQuery, refuse_repeated, row_filter, without_nul
from driftguard.api.incident_models import ExampleModel, IncidentDetail, IncidentModel, IncidentPage
from driftguard.api.openapi import example, problem
from driftguard.api.status import Places
from driftguard.errors import NotFound
from driftguard.incident_lifecycle import IllegalTransition, State
from driftguard.incidents import cost_measurement, remedy
from driftguard.store import captures, incidents, notifications, sources
from driftguard.store.incidents import Cursor
from driftguard.store.tables import Incident, Stream

router = APIRouter(prefix="/api/v1/incidents", tags=["incidents"])
AnyContext = Annotated[Context, Depends(get_context)]


class Reason(BaseModel):
    """Why the incident changes; it is stored with the transition."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"example": {"reason": "looking at it; new tenant went live"}},
    )
    reason: Annotated[str, Field(min_length=1, max_length=2_000), AfterValidator(without_nul)]


_ID = openapi_examples.INCIDENT["id"]
_NO_INCIDENT = problem(NotFound, f"there is no incident {_ID}")
_CHANGED = (
    example("incident")
    | _NO_INCIDENT
    | problem(
        IllegalTransition,
        "an incident that is resolved cannot become acknowledged; "
        "from resolved the legal next states are: none",
        from_state="resolved",
        to_state="acknowledged",
        legal=[],
    )
)


@router.get("", dependencies=[Depends(refuse_repeated)], responses=example("incidents"))
def list_incidents(query: Annotated[IncidentQuery, Query()], context: AnyContext) -> IncidentPage:
    """Lists incidents, newest first. By the time at which they were opened; `segment`: those in which one of
    these changed."""
    after = decode_cursor(query.cursor, Cursor) if query.cursor else None
    with context.database.session() as session:
        rows = incidents.list_page(
            session, limit=query.limit + 1, cursor=after, state=query.state, wanted=row_filter(query)
        )
        shown = rows[: query.limit]
        more = encode_cursor((shown[-1][0].opened_at, shown[-1][0].id)) if len(rows) > query.limit else None
        return IncidentPage(incidents=[IncidentModel.of(*row) for row in shown], next_cursor=more)


@router.get("/{incident_id}", responses=example("incident") | _NO_INCIDENT)
def get_incident(incident_id: UUID, context: AnyContext, request: Request) -> IncidentDetail:
    """Shows one incident, its transitions and notifications. What captured requests of `diagnosis.examples`
    say is shown to holders of an API key, where keys are needed."""
    with context.database.session() as session:
        return detail(session, incident_id, context, with_text=is_allowed(request))


@router.post("/{incident_id}/acknowledge", dependencies=[Depends(require_key)], responses=_CHANGED)
def acknowledge_incident(incident_id: UUID, body: Reason, context: AnyContext) -> IncidentDetail:
    """Says that a person has seen the incident. 409, with the legal next states, if it cannot be
    acknowledged."""
    return _move(context, incident_id, "acknowledged", body.reason)


@router.post("/{incident_id}/resolve", dependencies=[Depends(require_key)], responses=_CHANGED)
def resolve_incident(incident_id: UUID, body: Reason, context: AnyContext) -> IncidentDetail:
    """Ends an incident. The detector starts to look for the next change. 409 if it is already resolved."""
    return _move(context, incident_id, "resolved", body.reason)


@router.post("/{incident_id}/accept", dependencies=[Depends(require_key)], responses=_CHANGED)
def accept_new_level(incident_id: UUID, body: Reason, context: AnyContext) -> IncidentDetail:
    """Takes the new level as normal. Resolves the incident, and with the stream's next record the detector
    learns the baselines of its segments anew, from the change point on where it can. 409 if the incident is
    already resolved, or was not opened by the detector (but because the target was replaced)."""
    with context.database.session() as session:
        incidents.accept_level(session, incident_id, body.reason, datetime.now(UTC))
        return detail(session, incident_id, context, with_text=True)  # the key has been checked


@router.post("/{incident_id}/usual", dependencies=[Depends(require_key)], responses=_CHANGED)
def take_as_usual(incident_id: UUID, body: Reason, context: AnyContext) -> IncidentDetail:
    """Takes what the incident repeats as usual (see `evidence.repeats`). Resolves it, and from the stream's
    next record on the detector expects its segments to change so every day, or every week. 409 if the
    incident is already resolved, repeats none before it, or has turned out to differ from it."""
    with context.database.session() as session:
        incidents.take_as_usual(session, incident_id, body.reason, datetime.now(UTC))
        return detail(session, incident_id, context, with_text=True)  # the key has been checked


def _move(context: Context, incident_id: UUID, to_state: State, reason: str) -> IncidentDetail:
    with context.database.session() as session:
        incidents.move(session, incident_id, to_state, reason, datetime.now(UTC))
        return detail(session, incident_id, context, with_text=True)  # the key has been checked


def detail(
    session: Session, incident_id: UUID, context: Context, *, with_text: bool = False
) -> IncidentDetail:
    """with_text: of captured requests."""
    incident, stream = incidents.find(session, incident_id)
    alerting = context.settings.alerting
    return IncidentDetail.with_history(
        incident,
        stream,
        list(incidents.transitions(session, incident_id)),
        list(notifications.of_incident(session, incident_id)),
        destination.identities(alerting.alertmanager_urls, alerting.webhook_urls),
        _examples(session, incident, with_text=with_text),
        _actions(session, incident, stream, context),
    )


def _actions(session: Session, incident: Incident, stream: Stream, context: Context) -> list[ActionModel]:
    if incident.state == "resolved":
        return []
    place = Places.of(context, sources.all_sources(session)).at(stream.server, stream.draft_version)
    cost = incident.evidence.cost
    rollback = cost_measurement.rollback_of(session, stream, cost)
    return ActionModel.all_of(remedy.of_stream(cost, incident, rollback), place)


def _examples(session: Session, incident: Incident, *, with_text: bool) -> list[ExampleModel]:
    """Token ids of the diagnosis's examples that are still kept: captures have a retention of their own."""
    named = [UUID(record_id) for record_id in (incident.diagnosis.examples if incident.diagnosis else ())]
    return [
        ExampleModel(record_id=row.record_id, prompt_token_ids=row.prompt_token_ids if with_text else None)
        for row in captures.token_ids(session, named)
    ]
