"""The changes that a retraining makes to its incident's state. Each is stored with its reason."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from typing import Any, cast
from uuid import UUID

import structlog
from sqlalchemy.orm import Session

from driftguard.incident_lifecycle import State
from driftguard.records.documents.incident import Mitigation
from driftguard.store import incidents, retrain_runs
from driftguard.store.tables import Incident

log = structlog.get_logger(__name__)


def begin_mitigation(session: Session, incident_id: UUID | None, reason: str, at: datetime) -> None:
    """open or acknowledged -> mitigating. An incident in any other state stays as it is."""
    if incident_id is not None:
        incident, _ = incidents.find(session, incident_id)
        if incident.state in ("open", "acknowledged"):
            incidents.move(session, incident_id, "mitigating", reason, at)
            incident.evidence = replace(incident.evidence, is_retrained=True)


def tell_promotion(session: Session, incident_id: UUID | None, draft_version: str, at: datetime) -> None:
    """A draft that was trained for the incident is in service since `at`."""
    if incident_id is not None and (incident := incidents.lock(session, incident_id)) is not None:
        mitigation = Mitigation(draft_version, promoted_at=at)
        incident.evidence = replace(incident.evidence, mitigation=mitigation)


def end_mitigation(session: Session, incident_id: UUID | None, reason: str, at: datetime) -> None:
    """mitigating or recovered_in_part -> open or acknowledged, as it was before: the attempt has not helped.
    It stays mitigating while another attempt goes on, as where a draft that came late is watched."""
    if incident_id is not None and (incident := incidents.lock(session, incident_id)) is not None:
        told, runs = incident.evidence.mitigation, retrain_runs.of_incident(session, incident_id)
        others = [run for run in runs if run.ended_at is None and not retrain_runs.is_taken_back(run)]
        if told is not None and any(run.candidate_version == told.draft_version for run in others):
            return
        incident.evidence = replace(incident.evidence, mitigation=None, is_retrained=bool(others))
        if others and incident.state == "mitigating":
            return
        if incident.state in ("mitigating", "recovered_in_part"):
            steps = incidents.transitions(session, incident_id)
            before = [step.to_state for step in steps if step.to_state in ("open", "acknowledged")][-1]
            incidents.move(session, incident_id, cast("State", before), reason, at)


def recover_in_part(
    session: Session, incident_id: UUID | None, recovered: str, reason: str, at: datetime
) -> None:
    """-> recovered_in_part; does nothing where it is resolved already."""
    if incident_id is not None and (incident := _unresolved(session, incident_id)) is not None:
        incidents.move(session, incident_id, "recovered_in_part", reason, at)
        _tell(incident, recovered=recovered)
        log.info("incident recovered in part", incident=str(incident_id), reason=reason)


def tell_recovery(session: Session, incident_id: UUID | None, recovered: str) -> None:
    """How far it has recovered by now; does nothing where it is resolved."""
    if incident_id is not None and (incident := _unresolved(session, incident_id)) is not None:
        _tell(incident, recovered=recovered)


def tell_half(session: Session, incident_id: UUID | None, at: datetime) -> None:
    """Half of the fall is won back. A small fall may be over, and the incident resolved, before that is
    shown."""
    if incident_id is not None and (incident := incidents.lock(session, incident_id)) is not None:
        _tell(incident, half_at=at)


def _tell(incident: Incident, **known: Any) -> None:
    """Of the draft that was promoted for it."""
    if incident.evidence.mitigation is not None:
        mitigation = replace(incident.evidence.mitigation, **known)
        incident.evidence = replace(incident.evidence, mitigation=mitigation)


def resolve(
    session: Session, incident_id: UUID | None, reason: str, at: datetime, mitigated_at: datetime | None
) -> None:
    """-> resolved; does nothing where it is already. `mitigated_at`: when what helped came into service."""
    if incident_id is not None and (incident := _unresolved(session, incident_id)) is not None:
        incidents.move(session, incident_id, "resolved", reason, at, mitigated_at=mitigated_at)
        log.info("incident resolved", incident=str(incident_id), stream=incident.stream_id, reason=reason)


def _unresolved(session: Session, incident_id: UUID) -> Incident | None:
    """Locked, so that nobody resolves it meanwhile."""
    incident = incidents.lock(session, incident_id)
    return incident if incident is not None and incident.state != "resolved" else None
