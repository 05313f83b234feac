"""What was decided about incidents since the last fold (by a person, or by the watch over a promotion),
told to the detector.

The incident's row says what was decided; whether the detector's state holds the incident as open says if that
was applied. The fold commits both in one transaction, so a decision is neither lost nor applied twice.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from uuid import UUID

import structlog
from sqlalchemy.orm import Session

from driftguard.detection import Direction, StreamState, accept_new_normal, end_incident, treat_as_usual
from driftguard.detection.state.stream_state import DIRECTIONS
from driftguard.store import incidents
from driftguard.store.incidents import Decision

log = structlog.get_logger(__name__)


_SUPERSEDED = "the operator accepted a new level of the same segments; their baselines are learned anew"


@dataclass(frozen=True, slots=True)
class Decided:
    """The state before the next record, and the incidents that it holds open no longer."""

    state: StreamState
    superseded: Sequence[UUID] = ()


def decided(session: Session, stream_id: int, state: StreamState) -> Decided:
    """Called inside the fold's transaction, of a state with an open incident; stores nothing."""
    opened = open_directions(state)
    unresolved = {incident.direction: incident for incident in incidents.unresolved_of(session, stream_id)}
    decisions = {
        direction: incidents.decision_on(session, stream_id, direction)
        for direction in opened
        if direction not in unresolved
    }
    after = without_resolved(state, decisions)
    for direction, (decision, _) in decisions.items():
        log.info("an incident was resolved", stream=stream_id, direction=direction, decision=decision)
    left = open_directions(after)
    return Decided(after, [unresolved[each].id for each in opened if each in unresolved and each not in left])


def carry_out(session: Session, decided: Decided) -> None:
    for incident_id in decided.superseded:
        incidents.move(session, incident_id, "resolved", _SUPERSEDED, datetime.now(UTC))


def open_directions(state: StreamState) -> list[Direction]:
    return [direction for direction, incident in zip(DIRECTIONS, state.incidents, strict=True) if incident]


def without_resolved(
    state: StreamState, resolved: Mapping[Direction, tuple[Decision, Sequence[str]]]
) -> StreamState:
    """The state without its `resolved` incidents: what was decided on each, and the segments of each."""
    both = state.incidents
    for direction, (decision, segments) in resolved.items():
        if decision == "over":
            state = end_incident(state, direction)
            continue
        if decision != "new_normal":
            state = treat_as_usual(state, direction, decision, segments)
            continue
        if direction not in open_directions(state):  # it shared a segment with the one accepted before
            state = replace(state, incidents=both)
        state = accept_new_normal(state, direction)
    return state
