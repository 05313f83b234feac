"""From a finding to an incident: where, since when, how bad, what it costs, and who is told."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID, uuid5

import msgspec
import structlog
from sqlalchemy.orm import Session

from driftguard import fleet, incident_cost, incident_diagnosis, incident_severity, stream_cost
from driftguard.cost import Cost
from driftguard.detection import DriftOpened
from driftguard.incidents import formula_slowdown
from driftguard.positions import ACCEPTANCE, Positions, together
from driftguard.store import incidents, speeds
from driftguard.store.tables import Incident, Stream

# Makes an incident's id from what it is about: the same fold gives the same id.
_NAMESPACE: Final = UUID("5f2c1f1c-6f0e-4d0c-9a4b-6f5d3c1e7a90")
log = structlog.get_logger(__name__)


def open_from(
    session: Session,
    stream: Stream,
    finding: DriftOpened,
    destinations: Sequence[str],
    now: datetime,
    factor: float,
    page_slowdown: float,
) -> None:
    """Stores the incident with its diagnosis and, if it is a page, one notification per destination.

    factor: what the stream's own A was multiplied by, see driftguard.detection.fleet. page_slowdown: as in
    driftguard.incidents.
    """
    if known := incidents.unresolved_of(session, stream.id, finding.direction):
        log.warning("drift found again; its incident is still open", incident=str(known[0].id))
        return
    incident = _incident(session, stream, finding, now)
    incident.evidence[fleet.FACTOR] = factor
    incident_diagnosis.attach(session, incident, stream, now, page_slowdown)
    incidents.open_incident(session, incident, _reason(finding))
    incident_severity.announce(session, incident, destinations, now)
    log.warning(
        "incident opened",
        incident=str(incident.id),
        stream=stream.id,
        severity=incident.severity,
        since=incident.change_point_at.isoformat(),
        segments=[segment["segment"] for segment in incident.segments],
    )


def _reason(finding: DriftOpened) -> str:
    verb = "fell" if finding.direction == "down" else "rose"
    before, after = _changed_acceptance(finding)
    return (
        f"{ACCEPTANCE[_positions(finding)]} {verb} from {before:.2f} to {after:.2f}; "
        f"found {finding.requests_to_alarm} requests after the change"
    )


def _incident(session: Session, stream: Stream, finding: DriftOpened, now: datetime) -> Incident:
    changed_at = datetime.fromtimestamp(finding.change_point_at, UTC)
    times = speeds.ended_at(session, stream.id, set(finding.interval))
    change = stream_cost.Change(
        finding.change_point, changed_at, finding.ordinal, tuple(item.segment for item in finding.segments)
    )
    cost, drafted = stream_cost.at_change(
        session, stream, change, datetime.fromtimestamp(finding.ended_at, UTC)
    )
    acceptances = _changed_acceptance(finding)
    evidence = _evidence(finding, acceptances, cost, drafted)
    return Incident(
        id=uuid5(_NAMESPACE, f"{stream.id}/{finding.direction}/{finding.ordinal}"),
        stream_id=stream.id,
        direction=finding.direction,
        severity="warning",  # until it is diagnosed
        opened_at=now,
        opened_seq=finding.ordinal,
        change_point_seq=finding.change_point,
        change_point_at=changed_at,
        interval_start_at=times.get(finding.interval[0], changed_at),
        interval_end_at=times.get(finding.interval[1], changed_at),
        acceptance_before=acceptances[0],
        acceptance_after=acceptances[1],
        tokens_per_second_before=cost.before.tokens_per_second if cost and cost.before else None,
        tokens_per_second_after=cost.now.tokens_per_second if cost else None,
        segments=[msgspec.to_builtins(change) for change in finding.segments],
        evidence=evidence,
    )


def _evidence(
    finding: DriftOpened, acceptances: tuple[float, float], cost: Cost | None, drafted_per_step: float | None
) -> dict[str, Any]:
    """What the statement rests on, so that a reader can check it. Slowdowns are of the changed segments.

    By formula only where K does not vary: of acceptance at the first position no speed follows.
    """
    slowdown = None
    if drafted_per_step and _positions(finding) == "all":
        slowdown = formula_slowdown(*acceptances, drafted_per_step)
    return {
        "evidence": finding.evidence,
        "false_alarm_every": finding.false_alarm_every,
        "requests_to_alarm": finding.requests_to_alarm,
        "interval": list(finding.interval),
        "interval_level": finding.interval_level,
        "stream_before": msgspec.to_builtins(finding.before),
        "stream_after": msgspec.to_builtins(finding.after),
        "slowdown_formula": slowdown,
        "num_speculative_tokens": drafted_per_step,
        **incident_cost.evidence_of(cost),
    }


def _positions(finding: DriftOpened) -> Positions:
    return together(change.after.positions for change in finding.segments)


def _changed_acceptance(finding: DriftOpened) -> tuple[float, float]:
    """Acceptance of the changed segments before and after, both in the mix of segments after the change,
    so that only acceptance differs."""
    total = sum(change.after.requests for change in finding.segments)
    return (
        sum(change.before.rate * change.after.requests for change in finding.segments) / total,
        sum(change.after.rate * change.after.requests for change in finding.segments) / total,
    )
