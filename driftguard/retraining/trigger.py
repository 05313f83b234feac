"""Decides whether an incident calls for a retraining, and what it says has changed."""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from sqlalchemy.orm import Session

from driftguard.diagnosis import Confidence
from driftguard.records.documents.incident import changed_since, not_back
from driftguard.retraining.due import why_not
from driftguard.retraining.engines.engine_admin import EngineInfo
from driftguard.retraining.training.plan import Change, NothingToDo
from driftguard.store import acceptance_levels, incidents
from driftguard.store.tables import Incident


@dataclass(frozen=True, slots=True)
class Call:
    """The incident that calls for a retraining and its change; both None for a forced one without."""

    incident_id: UUID | None
    change: Change | None
    is_forced: bool


def what_calls_for_it(
    session: Session, info: EngineInfo, incident_id: UUID | None, *, forced: bool, least: Confidence
) -> Call | NothingToDo:
    """The given incident, else the newest unresolved fall of the draft in service, else a forced call.

    An incident whose diagnosis does not call for a retraining, with the `least` confidence, counts only
    when forced.
    Raises NotFound for an incident that does not exist.
    """
    if incident_id is not None:
        named = _named(session, info, incident_id)
        return _unless_diagnosed(named, least, forced=forced) if isinstance(named, Incident) else named
    falls = [
        incident
        for stream_id in acceptance_levels.stream_ids(session, info.server, info.target, info.draft.version)
        for incident in incidents.unresolved_of(session, stream_id, "down")
    ]
    if falls:
        newest = max(falls, key=lambda incident: incident.opened_at)
        return _unless_diagnosed(newest, least, forced=forced)
    if forced:
        return Call(None, None, is_forced=True)
    return NothingToDo(f"no incident calls for it: none is open about a fall of draft {info.draft.version}")


def _unless_diagnosed(incident: Incident, least: Confidence, *, forced: bool) -> Call | NothingToDo:
    reason = why_not(incident.diagnosis, least, may_be_usual=incident.evidence.may_be_usual)
    if reason is not None and not forced:
        return NothingToDo(f"incident {incident.id} does not call for it: {reason}; --force retrains anyway")
    return _call(incident, is_forced=forced)


def _named(session: Session, info: EngineInfo, incident_id: UUID) -> Incident | NothingToDo:
    incident, stream = incidents.find(session, incident_id)
    if incident.state == "resolved":
        return NothingToDo(f"incident {incident_id} is resolved")
    if incident.direction == "slower":
        return NothingToDo(f"incident {incident_id} is about goodput, which no draft mends")
    if incident.direction != "down":
        return NothingToDo(f"incident {incident_id} says that acceptance rose")
    if (stream.server, stream.target) != (info.server, info.target):
        return NothingToDo(
            f"incident {incident_id} is about {stream.server} / {stream.target}, "
            f"not {info.server} / {info.target}"
        )
    if stream.draft_version != info.draft.version:
        return NothingToDo(
            f"incident {incident_id} is about draft {stream.draft_version}; "
            f"draft {info.draft.version} is in service now"
        )
    return incident


def _call(incident: Incident, *, is_forced: bool) -> Call:
    # What is back is traffic as any other. Under an older name a segment may have changed already.
    changed = not_back(incident.segments)
    since = {name: incident.change_point_at for each in changed for name in each.renamed_from}
    since |= changed_since(changed, incident.change_point_at)
    return Call(incident.id, Change(since, incident.opened_at), is_forced)
