"""A stored detector state that this version cannot read: its stream begins anew, and says why."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

import structlog
from sqlalchemy.orm import Session

from driftguard.detection import OtherVersion, StreamState, UnreadableState
from driftguard.metrics import Metrics
from driftguard.store import incidents, streams
from driftguard.store.streams import RELEARNING, RelearningReason

_GOES_ON: Final = "the fall is over once more than half of it is won back"
log = structlog.get_logger(__name__)


def begin_anew(session: Session, stream_id: int, error: UnreadableState, metrics: Metrics) -> StreamState:
    """The first state. Called inside the fold's transaction. The new state learns the level of now as normal,
    so it cannot tell when a fall that the old one held open is over: its newest requests are asked
    (`driftguard.incidents.found_back`). A rise is resolved."""
    now = datetime.now(UTC)
    because: RelearningReason = "other_version" if isinstance(error, OtherVersion) else "damaged"
    reason = RELEARNING[because]
    if because == "other_version":  # what an upgrade brings about: nothing is broken
        log.warning(reason, stream=stream_id, error=str(error))
        metrics.fold.states_of_other_version.inc()
    else:
        log.error(reason, stream=stream_id, error=str(error))
        metrics.fold.states_lost.inc()
    streams.begin_anew(session, stream_id, now, because=because)
    for incident in incidents.unresolved_of(session, stream_id):
        if incident.evidence.goodput is not None:
            continue  # the watch over goodput keeps its own state
        if incident.direction == "down":
            incident.segments = tuple(replace(each, forgotten=True) for each in incident.segments)
            incidents.note(session, incident, f"{reason} ({error}); {_GOES_ON}", now)
        else:
            incidents.move(session, incident.id, "resolved", f"{reason} ({error})", now)
    return StreamState()
