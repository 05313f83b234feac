"""The changes that a retraining makes to its incident's state. Each is stored with its reason."""

from __future__ import annotations

from datetime import datetime
from typing import cast
from uuid import UUID

import structlog
from sqlalchemy.orm import Session

from driftguard.incident_lifecycle import State
from driftguard.store import incidents

log = structlog.get_logger(__name__)


def begin_mitigation(session: Session, incident_id: UUID | None, reason: str, at: datetime) -> None:
    """open or acknowledged -> mitigating. An incident that is resolved or mitigating stays as it is."""
    if incident_id is not None:
        incident, _ = incidents.find(session, incident_id)
        if incident.state in ("open", "acknowledged"):
            incidents.move(session, incident_id, "mitigating", reason, at)


def end_mitigation(session: Session, incident_id: UUID | None, reason: str, at: datetime) -> None:
    """mitigating -> open or acknowledged, as it was before: the attempt has not helped."""
    if incident_id is not None:
        incident, _ = incidents.find(session, incident_id)
        if incident.state == "mitigating":
            steps = incidents.transitions(session, incident_id)
            before = [step.from_state for step in steps if step.from_state != step.to_state][-1]
            incidents.move(session, incident_id, cast("State", before), reason, at)


def resolve(
    session: Session, incident_id: UUID | None, reason: str, at: datetime, mitigated_at: datetime | None
) -> None:
    """-> resolved; does nothing where it is already. `mitigated_at`: when what helped came into service."""
    if incident_id is not None:
        incident, _ = incidents.find(session, incident_id)
        if incident.state != "resolved":
            incidents.move(session, incident_id, "resolved", reason, at, mitigated_at=mitigated_at)
            log.info("incident resolved", incident=str(incident_id), stream=incident.stream_id, reason=reason)
