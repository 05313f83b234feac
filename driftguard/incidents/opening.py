"""How an incident opens, by the detector or for a replaced target, how grave it is, and who is told.

An incident says where, since when and how much acceptance changed. What that costs, why it came and hence how
grave it is says its examination (`examination.py`), right after the commit: nobody is told of it before. Its
severity may become graver, never less grave, until it is over.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Final, cast
from uuid import UUID, uuid5

import structlog
from sqlalchemy.orm import Session

from driftguard.detection import DriftClosed, DriftOpened, DriftWidened, SegmentChange
from driftguard.incident_lifecycle import PAGE_SLOWDOWN, Direction, Severity, formula_slowdown, severity
from driftguard.records.documents.acceptance import from_to
from driftguard.records.documents.incident import ChangedSegment, IncidentEvidence, names_of, positions_of
from driftguard.records.positions import ACCEPTANCE, combined
from driftguard.store import incidents, notifications
from driftguard.store.tables import Incident, Stream

# Makes an incident's id from what it is about: the same fold gives the same id.
_NAMESPACE: Final = UUID("5f2c1f1c-6f0e-4d0c-9a4b-6f5d3c1e7a90")
log = structlog.get_logger(__name__)


def open_incident(session: Session, incident: Incident, reason: str) -> None:
    """Stores the incident, which awaits its examination, and why it opened. One of this id, and one of this
    stream and direction that is not resolved, stay as they are."""
    if known := incidents.unresolved_of(session, incident.stream_id, incident.direction):
        log.warning("drift found again; its incident is still open", incident=str(known[0].id))
        return
    if session.get(Incident, incident.id) is not None:
        return
    incident.severity, incident.awaits_examination = "info", True
    incidents.open_incident(session, incident, reason)
    log.warning(
        "incident opened",
        incident=str(incident.id),
        stream=incident.stream_id,
        since=incident.change_point_at.isoformat(),
        segments=list(names_of(incident.segments)),
        reason=reason,
    )


def from_finding(stream: Stream, finding: DriftOpened, now: datetime, factor: float) -> tuple[Incident, str]:
    """The incident of an alarm, and why it opens. `factor`: what the stream's own A was multiplied by, see
    driftguard.detection.fleet."""
    incident = _incident(stream, finding, factor, now)
    return incident, _reason(finding, incident.segments)


def widen(session: Session, stream: Stream, finding: DriftWidened, now: datetime) -> None:
    """More segments changed while the incident of this direction is open: it names them as well, its
    acceptance is that of all, and its cost is measured anew, which may make it graver
    (`cost_measurement.py`)."""
    for incident in incidents.unresolved_of(session, stream.id, finding.direction):
        named = set(names_of(incident.segments))
        joined = _segments([change for change in finding.segments if change.segment not in named])
        if not joined:
            continue
        verb = "fell" if finding.direction == "down" else "rose"
        moves = ", ".join(
            f"{each.segment} from {each.before.rate:.2f} to {each.after.rate:.2f}" for each in joined
        )
        since = datetime.fromtimestamp(finding.change_point_at, UTC)
        reason = (
            f"{ACCEPTANCE[positions_of(joined)]} {verb} in more segments, since {since:%Y-%m-%d %H:%M:%S} "
            f"UTC: {moves}; found {finding.requests_to_alarm} requests after the change"
        )
        incident.segments = (*incident.segments, *joined)
        before, after = _acceptance_of(incident.segments)
        incident.acceptance_before, incident.acceptance_after = before, after
        known = incident.evidence
        slower = by_formula(incident, known.num_speculative_tokens)
        incident.evidence = replace(known, slowdown_measured=None, slowdown_formula=slower, cost=None)
        incidents.note(session, incident, reason, now)
        log.warning("incident widened", incident=str(incident.id), stream=stream.id, reason=reason)


def by_formula(incident: Incident, drafted_per_step: float | None) -> float | None:
    """Part of the tokens per second lost. None where K varies: no speed follows from the first position."""
    if not drafted_per_step or positions_of(incident.segments) != "all":
        return None
    return formula_slowdown(incident.acceptance_before, incident.acceptance_after, drafted_per_step)


def closing_reason(finding: DriftClosed) -> str:
    """Why the detector says that it is over, in words."""
    names = ", ".join(change.segment for change in finding.segments)
    if finding.reason == "became_normal":
        levels = ", ".join(f"{change.segment} {change.after.rate:.2f}" for change in finding.segments)
        return f"the rise has lasted, and is the baseline from now on: {levels}"
    if finding.reason == "no_traffic":
        return f"the changed segments ({names}) send no traffic any more"
    now = ", ".join(f"{change.segment} {change.after.rate:.2f}" for change in finding.segments)
    acceptance = ACCEPTANCE[combined([change.after.positions for change in finding.segments])]
    return f"{acceptance} is back at its baseline: {now}"


def _reason(finding: DriftOpened, segments: Sequence[ChangedSegment]) -> str:
    verb = "fell" if finding.direction == "down" else "rose"
    levels = from_to(finding.adjusted.before, finding.adjusted.after)
    return (
        f"{ACCEPTANCE[positions_of(segments)]} {verb} from {levels}; "
        f"found {finding.requests_to_alarm} requests after the change"
    )


def _incident(stream: Stream, finding: DriftOpened, factor: float, now: datetime) -> Incident:
    changed_at = datetime.fromtimestamp(finding.change_point_at, UTC)
    return Incident(
        id=uuid5(_NAMESPACE, f"{stream.id}/{finding.direction}/{finding.ordinal}"),
        stream_id=stream.id,
        direction=finding.direction,
        opened_at=now,
        opened_seq=finding.ordinal,
        change_point_seq=finding.change_point,
        change_point_at=changed_at,
        interval_start_at=changed_at,
        interval_end_at=changed_at,
        acceptance_before=finding.adjusted.before,
        acceptance_after=finding.adjusted.after,
        segments=_segments(finding.segments),
        evidence=IncidentEvidence(
            evidence=finding.evidence,
            false_alarm_every=finding.false_alarm_every,
            false_alarm_factor=factor,
            requests_to_alarm=finding.requests_to_alarm,
            interval=finding.interval,
            interval_level=finding.interval_level,
            stream_before=finding.before,
            stream_after=finding.after,
            adjusted=finding.adjusted,
            gradual=finding.gradual,
        ),
    )


def _segments(changes: Sequence[SegmentChange]) -> tuple[ChangedSegment, ...]:
    return tuple(
        ChangedSegment(each.segment, each.before, each.after, each.evidence, each.adjusted)
        for each in changes
    )


def _acceptance_of(segments: Sequence[ChangedSegment]) -> tuple[float, float]:
    """Acceptance of the changed segments before and after as it was tested, both in the mix of segments after
    the change, so that only acceptance differs."""
    total = sum(each.after.requests for each in segments)
    levels = [
        (each.adjusted.before, each.adjusted.after) if each.adjusted else (each.before.rate, each.after.rate)
        for each in segments
    ]
    return (
        sum(before * each.after.requests for (before, _), each in zip(levels, segments, strict=True)) / total,
        sum(after * each.after.requests for (_, after), each in zip(levels, segments, strict=True)) / total,
    )


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
    known = incident.diagnosis
    if known is not None and known.cause == "quality":
        return "warning"
    if known is not None and known.cause in ("mix_shift", "configuration") and known.confidence == "high":
        return "info"
    return severity(cast("Direction", incident.direction), slowdown, paging.slowdown)


def announce(session: Session, incident: Incident, paging: Paging, now: datetime) -> None:
    """Tells every destination of a stored incident, if it is a page."""
    if incident.severity != "info":
        incidents.announce(session, incident.id, paging.destinations, "firing", incident.severity, now)


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
