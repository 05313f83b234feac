"""How grave an incident is, and who is told. It may become graver, never less grave, until it is over."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime

import structlog
from sqlalchemy.orm import Session

from driftguard.incident_lifecycle import (
    PAGE_SLOWDOWN,
    Direction,
    Severity,
    severity,
)
from driftguard.store import incidents, notifications
from driftguard.store.tables import Incident

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Paging:
    """Who is paged, and from when on. `destinations`: to which notifications are sent. `slowdown`: a fall is
    a page from this part of the tokens per second on, in [0, 1]."""

    destinations: tuple[str, ...] = ()
    slowdown: float = PAGE_SLOWDOWN


NOBODY = Paging()


def severity_of(incident: Incident, slowdown: float | None, paging: Paging = NOBODY) -> Severity:
    """By its cause and by what it costs. Suspicious answers are a page although nothing got slower; what is
    surely no fault is none. `slowdown`: part of the tokens per second lost; None: not known."""
    direction: Direction = "down" if incident.direction == "down" else "up"
    known = incident.diagnosis
    if known is not None and known.cause == "quality":
        return "warning"
    if known is not None and known.cause in ("mix_shift", "configuration") and known.confidence == "high":
        return "info"
    return severity(direction, slowdown, paging.slowdown)


def announce(session: Session, incident: Incident, paging: Paging, now: datetime) -> None:
    """Tells every destination of a stored incident, if it is a page."""
    if incident.severity != "info":
        notifications.announce(session, incident.id, paging.destinations, "firing", incident.severity, now)


def announce_examined(session: Session, incident: Incident, paging: Paging, now: datetime) -> None:
    """Ends the wait for the examination of an incident, locked by the caller: it gets its first severity, by
    what is known of it, and is told. What is over by then is told too, with its end, as if it had been told
    at once."""
    incidents.end_wait(session, incident, severity_of(incident, incident.evidence.slowdown, paging))
    announce(session, incident, paging, now)
    if incident.state == "resolved":
        incidents.announce_resolution(session, incident, now)


def raise_to(
    session: Session, incident: Incident, graver: Severity, reason: str, paging: Paging, now: datetime
) -> bool:
    """Writes it into the incident's history and pages again. False where it is as grave already, or over."""
    told = f"{graver} instead of {incident.severity}: {reason}"
    if not incidents.raise_severity(session, incident, graver, told, now):
        return False
    incident.evidence = replace(incident.evidence, raised_because=reason)
    notifications.drop_undelivered(session, incident.id)
    announce(session, incident, paging, now)
    log.warning("incident became graver", incident=str(incident.id), severity=graver, reason=reason)
    return True
