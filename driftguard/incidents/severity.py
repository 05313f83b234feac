"""How grave an incident is, and who is told. It may become graver, never less grave, until it is over."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import structlog
from sqlalchemy.orm import Session

from driftguard.incident_lifecycle import PAGE_SLOWDOWN, RAISED, Direction, Severity, severity
from driftguard.store import incidents, notifications
from driftguard.store.tables import Incident

log = structlog.get_logger(__name__)


def severity_of(incident: Incident, slowdown: float | None, page_slowdown: float = PAGE_SLOWDOWN) -> Severity:
    """Pages for suspicious answers although nothing got slower; no page where nothing is broken for sure."""
    direction: Direction = "down" if incident.direction == "down" else "up"
    known = incident.diagnosis or {"cause": None}
    if known["cause"] == "quality":
        return "warning"
    if known["cause"] in ("mix_shift", "configuration") and known["confidence"] == "high":
        return "info"
    return severity(direction, slowdown, page_slowdown)


def announce(session: Session, incident: Incident, destinations: Sequence[str], now: datetime) -> None:
    """Tells every destination of a stored incident, if it is a page."""
    if incident.severity != "info":
        notifications.announce(session, incident.id, destinations, "firing", incident.severity, now)


def tell(
    session: Session, incident: Incident, first: Severity, destinations: Sequence[str], now: datetime
) -> None:
    """Ends the wait for the examination of an incident, locked by the caller: from now on it is as grave as
    `first`, and told. What is over by then is told too, with its end, as if it had been told at once."""
    incidents.end_wait(session, incident, first)
    announce(session, incident, destinations, now)
    if incident.state == "resolved":
        incidents.announce_resolution(session, incident, now)


def raise_to(
    session: Session,
    incident: Incident,
    graver: Severity,
    reason: str,
    destinations: Sequence[str],
    now: datetime,
) -> bool:
    """Writes it into the incident's history and pages again. False where it is as grave, or over, already."""
    told = f"{graver} instead of {incident.severity}: {reason}"
    if not incidents.raise_severity(session, incident, graver, told, now):
        return False
    incident.evidence = {**incident.evidence, RAISED: reason}
    notifications.drop_undelivered(session, incident.id)
    announce(session, incident, destinations, now)
    log.warning("incident became graver", incident=str(incident.id), severity=graver, reason=reason)
    return True
