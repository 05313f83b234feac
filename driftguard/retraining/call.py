"""Does anything call for a retraining, and what does it say changed?"""

from __future__ import annotations

from dataclasses import dataclass
from uuid import UUID

from sqlalchemy.orm import Session

from driftguard.retraining.engine_admin import EngineInfo
from driftguard.retraining.plan import Change, NothingToDo
from driftguard.store import acceptance_levels, incidents
from driftguard.store.tables import Incident


@dataclass(frozen=True, slots=True)
class Call:
    """The incident that calls for a retraining and its change; both None for a forced one."""

    incident_id: UUID | None
    change: Change | None


def what_calls_for_it(
    session: Session, info: EngineInfo, incident_id: UUID | None, *, forced: bool
) -> Call | NothingToDo:
    """The named incident, else the newest unresolved fall of the draft in service, else force.

    Raises NotFound for an incident that does not exist.
    """
    if info.draft.method != "draft_model" or info.draft.directory is None:
        return NothingToDo(
            f"the draft in service, {info.draft.name}, is of the method {info.draft.method}: "
            "there is no model to train"
        )
    if incident_id is not None:
        return _named(session, info, incident_id)
    falls = [
        incident
        for stream_id in acceptance_levels.stream_ids(session, info.server, info.target, info.draft.version)
        for incident in incidents.unresolved_of(session, stream_id, "down")
    ]
    if falls:
        return _call(max(falls, key=lambda incident: incident.opened_at))
    if forced:
        return Call(None, None)
    return NothingToDo(f"no incident calls for it: draft {info.draft.version} accepts as it should")


def _named(session: Session, info: EngineInfo, incident_id: UUID) -> Call | NothingToDo:
    incident, stream = incidents.find(session, incident_id)
    if incident.state == "resolved":
        return NothingToDo(f"incident {incident_id} is resolved")
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
    return _call(incident)


def _call(incident: Incident) -> Call:
    segments = frozenset(str(segment["segment"]) for segment in incident.segments)
    return Call(incident.id, Change(segments, incident.change_point_at, incident.opened_at))
