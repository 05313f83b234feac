"""The diagnosis of an incident: gathered from the store, decided purely, kept with the incident.

It is made when the incident is examined, and again when evidence comes in that was missing then: canary
probes replayed since the change, captured requests, their scores, or the end of the wait for the probes. Not
when evidence is dropped that is past its retention: the incident keeps what was made of it.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Final, cast
from uuid import UUID

import structlog
from sqlalchemy.orm import Session

from driftguard.diagnosis import Evidence, diagnose
from driftguard.incident_lifecycle import Direction, is_graver
from driftguard.incidents.opening import Paging, raise_to, severity_of
from driftguard.records.documents.incident import IncidentDiagnosis, SeenEvidence, going_on, names_of
from driftguard.store import incidents
from driftguard.store.database import CHORE, Database, each_apart
from driftguard.store.examination_evidence import (
    Moment,
    captures_around,
    engine_change,
    is_before_kept,
    probes_around,
    records_around,
    records_between,
    scores_of,
    seen_since,
)
from driftguard.store.streams import get_stream
from driftguard.store.tables import Incident, Stream

AWAIT_PROBES: Final = timedelta(minutes=30)  # after the incident opened; then it goes without them
_CAPTURE_STEPS: Final = (10, 50)  # captured requests since the change that make the queries comparable
_INCIDENTS: Final = 1_000
log = structlog.get_logger(__name__)


def gather(session: Session, incident: Incident, stream: Stream, now: datetime) -> Evidence:
    """Everything stored that bears on what is not back of this incident."""
    changed = names_of(going_on(incident.segments))
    moment = _moment(incident)
    before, after = records_around(session, stream.id, moment)
    replaced = _predecessor(session, incident)
    if replaced is not None:
        before = records_between(session, replaced.id, 0, moment.seq, moment.at)
    probes_before, probes_after = probes_around(session, stream.id, moment, incident.interval_start_at)
    captures_before, captures_after = captures_around(session, stream, changed, incident.change_point_at)
    scores, missing_scores = scores_of(session, incident.id)
    return Evidence(
        direction=cast("Direction", incident.direction),
        changed=changed,
        before=before,
        after=after,
        probes_before=probes_before,
        probes_after=probes_after,
        probes_awaited=bool(probes_before) and now - incident.opened_at < AWAIT_PROBES,
        captures_before=captures_before,
        captures_after=captures_after,
        engine_change=engine_change(session, stream, moment, incident.interval_start_at),
        replaced_target=replaced.target if replaced and replaced.target != stream.target else None,
        replaced_draft=replaced.draft_version if replaced and replaced.target == stream.target else None,
        goodput=incident.evidence.goodput,
        scores=scores,
        missing_scores=missing_scores,
    )


def _moment(incident: Incident) -> Moment:
    return Moment(incident.change_point_seq, incident.change_point_at, incident.opened_seq)


def _predecessor(session: Session, incident: Incident) -> Stream | None:
    """The stream before, where the incident is about a replaced target or draft."""
    stream_id = incident.evidence.predecessor_stream_id
    return None if stream_id is None else get_stream(session, stream_id)


def diagnosed(session: Session, incident: Incident, stream: Stream, now: datetime) -> IncidentDiagnosis:
    """What is kept with the incident: the diagnosis, when it was made, and on how much."""
    diagnosis = diagnose(gather(session, incident, stream, now))
    log.info(
        "incident diagnosed",
        incident=str(incident.id),
        cause=diagnosis.cause,
        confidence=diagnosis.confidence,
        reason=diagnosis.reason,
    )
    return IncidentDiagnosis.of(diagnosis, now, _seen(session, incident, stream))


def refresh(database: Database, paging: Paging, now: datetime) -> None:
    """Diagnoses unresolved incidents again for which something new is known, each in transactions of its
    own: raises what the first that failed raised, after all the others (`each_apart`)."""
    with database.session(CHORE) as session:
        known = [
            incident.id for incident, _ in incidents.list_page(session, limit=_INCIDENTS, state="unresolved")
        ]

    each_apart(known, lambda one: _diagnose_again(database, one, paging, now), _tell_failure)


def _tell_failure(incident_id: UUID) -> None:
    log.exception("diagnosing again failed and will be tried again", incident=str(incident_id))


def _diagnose_again(database: Database, incident_id: UUID, paging: Paging, now: datetime) -> None:
    """Reads, then stores in a short transaction of its own, in which nobody else changes the incident."""
    with database.session(CHORE) as session:
        incident, stream = incidents.find(session, incident_id)
        if incident.state == "resolved" or not _is_outdated(session, incident, stream, now):
            return
        diagnosis = diagnosed(session, incident, stream, now)
    with database.session(CHORE) as session:
        present = incidents.lock(session, incident_id)
        if present is None or present.state == "resolved":
            return
        slowdown = present.evidence.slowdown
        by_old_cause = severity_of(present, slowdown, paging)
        present.diagnosis = diagnosis
        by_new_cause = severity_of(present, slowdown, paging)
        if is_graver(by_new_cause, by_old_cause):  # by its cost alone it is raised where that is measured
            reason = f"diagnosed again: {diagnosis.summary}"
            raise_to(session, present, by_new_cause, reason, paging, now)


def _is_outdated(session: Session, incident: Incident, stream: Stream, now: datetime) -> bool:
    known = incident.diagnosis
    if known is None:
        return False  # it has never been examined: driftguard.incidents.examination is at it
    if known.awaits_probes and now - incident.opened_at >= AWAIT_PROBES:
        return True
    seen = _seen(session, incident, stream)
    if seen.scores != known.seen.scores:
        return True
    is_more = seen.probes > known.seen.probes or seen.captures > known.seen.captures
    is_less = seen.probes < known.seen.probes or seen.captures < known.seen.captures
    # Past its retention evidence is dropped: what is left of it would say less than is known.
    return is_more and not is_less and _is_before_kept(session, incident)


def _is_before_kept(session: Session, incident: Incident) -> bool:
    """Whether the time before the change is still known, where it was compared."""
    if incident.evidence.goes_on is not None:
        return True
    before = incident.evidence.predecessor_stream_id or incident.stream_id
    return is_before_kept(session, before, _moment(incident))


def _seen(session: Session, incident: Incident, stream: Stream) -> SeenEvidence:
    """Changes when there is enough that is new for another diagnosis."""
    changed = names_of(incident.segments)
    probes, captured, scores = seen_since(
        session, stream, incident.id, changed, _moment(incident), max(_CAPTURE_STEPS)
    )
    return SeenEvidence(probes, sum(captured >= step for step in _CAPTURE_STEPS), scores)
