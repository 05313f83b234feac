"""The examination of a new incident: what its change costs and why it came, hence how grave it is.

The fold stores what the detector found and nothing else, because what an examination reads may be millions of
records. It happens right after that commit, in transactions of its own; then the incident is told, once, with
its cause. Whoever dies in between leaves an incident that still awaits it. An examination that fails or takes
longer than PATIENCE delays no page: the incident is told without its cause, and examined later.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

import structlog
from sqlalchemy.orm import Session

from driftguard.cost import Cost
from driftguard.incident_lifecycle import formula_slowdown
from driftguard.incidents import cost_measurement, cost_update, diagnosing, severity
from driftguard.incidents.severity import Paging
from driftguard.records.documents.incident import names_of, positions_of
from driftguard.store import examination_evidence, incidents
from driftguard.store.database import CHORE, EXAMINATION, Database
from driftguard.store.tables import Incident, Stream

PATIENCE: Final = timedelta(seconds=15)  # from the opening of an incident to its page without a cause
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Change:
    """What the records around a change point say; `interval`: when its first and its last record ended.

    `drafted_per_step`: draft tokens per step in the changed segments. None where no record tells.
    """

    interval: tuple[datetime, datetime]
    cost: Cost | None
    drafted_per_step: float | None


def examine(
    database: Database,
    incident_id: UUID,
    paging: Paging,
    now: datetime,
) -> None:
    """Reads, then stores and tells in a short transaction of its own: the fold waits for what that locks.

    Raises DatabaseUnavailable, and whatever an examination raises.
    """
    with database.session(EXAMINATION) as session:
        incident, stream = incidents.find(session, incident_id)
        change = _read(session, incident, stream) if incident.evidence.is_of_alarm else None
        diagnosis = diagnosing.diagnosed(session, incident, stream, now)
    with database.session(CHORE) as session:
        examined = incidents.lock(session, incident_id)
        if examined is None or examined.diagnosis is not None:
            return  # another sidecar was faster
        if change is not None:
            _complete(examined, change)
        examined.diagnosis = diagnosis
        _announce(session, examined, paging, now)


def announce_overdue(database: Database, paging: Paging, now: datetime) -> int:
    """Tells the incidents that have waited for PATIENCE, by what the detector found; how many."""
    with database.session(CHORE) as session:
        waiting = incidents.awaiting_since(session, now - PATIENCE)
        for incident in waiting:
            severity.announce_examined(session, incident, paging, now)
            log.error("incident told unexamined", incident=str(incident.id), severity=incident.severity)
    return len(waiting)


def _announce(session: Session, incident: Incident, paging: Paging, now: datetime) -> None:
    if incident.awaits_examination:
        severity.announce_examined(session, incident, paging, now)
    else:
        why = incident.diagnosis.summary if incident.diagnosis else None
        known = severity.severity_of(incident, incident.evidence.slowdown, paging)
        severity.raise_to(session, incident, known, f"examined late: {why}", paging, now)
    log.warning(
        "incident examined", incident=str(incident.id), stream=incident.stream_id, severity=incident.severity
    )


def _read(session: Session, incident: Incident, stream: Stream) -> _Change | None:
    """None of an incident that tells its cost already, or is of a version that did not keep the interval."""
    ends = incident.evidence.interval
    if ends is None or incident.evidence.cost is not None:
        return None
    times = examination_evidence.ended_at(session, stream.id, {*ends, incident.opened_seq})
    change = cost_measurement.Change(
        incident.change_point_seq, incident.change_point_at, incident.opened_seq, names_of(incident.segments)
    )
    newest = times.get(incident.opened_seq, incident.opened_at)
    cost, drafted = cost_measurement.at_change(session, stream, change, newest)
    first, last = (times.get(end, incident.change_point_at) for end in ends)
    return _Change((first, last), cost, drafted)


def _complete(incident: Incident, change: _Change) -> None:
    cost, drafted = change.cost, change.drafted_per_step
    incident.interval_start_at, incident.interval_end_at = change.interval
    incident.tokens_per_second_before = cost.before.tokens_per_second if cost and cost.before else None
    incident.tokens_per_second_after = cost.now.tokens_per_second if cost else None
    found = replace(
        incident.evidence, slowdown_formula=_by_formula(incident, drafted), num_speculative_tokens=drafted
    )
    incident.evidence = cost_update.with_cost(found, cost)


def _by_formula(incident: Incident, drafted_per_step: float | None) -> float | None:
    """Only where K does not vary: of acceptance at the first position no speed follows."""
    if not drafted_per_step or positions_of(incident.segments) != "all":
        return None
    return formula_slowdown(incident.acceptance_before, incident.acceptance_after, drafted_per_step)
