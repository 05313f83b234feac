"""What was decided about incidents since the last fold (by a person, a comparison, or the watch over a
promotion), told to the detector.

The incident's row says what was decided; whether the detector's state holds the incident as open, and which
segments of it, says if that was applied. The fold commits both in one transaction, so a decision is neither
lost nor applied twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from uuid import UUID

import structlog
from sqlalchemy.orm import Session

from driftguard.detection import (
    Direction,
    StreamState,
    accept_new_normal,
    end_incident,
    leave_incident,
    treat_as_usual,
)
from driftguard.detection.state.stream_state import DIRECTIONS
from driftguard.incidents.opening import come_back
from driftguard.records.documents.incident import names_of, over_by_now
from driftguard.store import incidents
from driftguard.store.incidents import Decision

log = structlog.get_logger(__name__)


_SUPERSEDED = "the operator accepted a new level of {}: what it accepts is learned anew"


@dataclass(frozen=True, slots=True)
class Decided:
    """The state before the next record; of incidents that are not resolved, the segments that an operator
    accepted in the other direction."""

    state: StreamState
    superseded: Mapping[UUID, Sequence[str]] = field(default_factory=dict)


def decided(session: Session, stream_id: int, state: StreamState) -> Decided:
    """Called inside the fold's transaction, of a state with an open incident; stores nothing."""
    unresolved = {incident.direction: incident for incident in incidents.unresolved_of(session, stream_id)}
    for direction in DIRECTIONS:
        if direction in unresolved:
            over = over_by_now(unresolved[direction].segments)
            state = leave_incident(state, direction, names_of(over))
    opened = open_segments(state)
    decisions = {
        direction: incidents.decision_on(session, stream_id, direction)
        for direction in opened
        if direction not in unresolved
    }
    after = without_resolved(state, decisions)
    for direction, (decision, _) in decisions.items():
        log.info("an incident was resolved", stream=stream_id, direction=direction, decision=decision)
    left = open_segments(after)
    superseded = {
        unresolved[direction].id: [name for name in names if name not in left.get(direction, ())]
        for direction, names in opened.items()
        if direction in unresolved
    }
    return Decided(after, {incident: names for incident, names in superseded.items() if names})


def carry_out(session: Session, decided: Decided) -> None:
    now = datetime.now(UTC)
    for incident_id, names in decided.superseded.items():
        if (incident := incidents.lock(session, incident_id)) is not None:
            reason = _SUPERSEDED.format(", ".join(names))
            at = datetime.fromtimestamp(decided.state.last_ended_at, UTC)
            come_back(session, incident, names, reason, now, at, is_back=False)


def open_segments(state: StreamState) -> dict[Direction, tuple[str, ...]]:
    """Those of its open incidents."""
    both = zip(DIRECTIONS, state.incidents, strict=True)
    return {direction: incident.names(state) for direction, incident in both if incident}


def without_resolved(
    state: StreamState, resolved: Mapping[Direction, tuple[Decision, Sequence[str]]]
) -> StreamState:
    """The state without its `resolved` incidents: what was decided on each, and the segments of each."""
    _, up = state.incidents
    for direction, (decision, segments) in resolved.items():
        if decision == "over":
            state = end_incident(state, direction)
        elif decision == "new_normal":
            if direction == "up":  # with what it shared with the fall accepted before
                state = replace(state, incidents=(state.incidents[0], up))
            state = accept_new_normal(state, direction)
        else:
            state = treat_as_usual(state, direction, decision, segments)
    return state
