"""A stored detector state that this version cannot read: its stream begins anew, and says why."""

from __future__ import annotations

from datetime import UTC, datetime

import structlog
from sqlalchemy.orm import Session

from driftguard.detection import OtherVersion, StreamState, UnreadableState
from driftguard.metrics import Metrics
from driftguard.store import incidents, streams
from driftguard.store.streams import RELEARNING, RelearningReason

log = structlog.get_logger(__name__)


def begin_anew(session: Session, stream_id: int, error: UnreadableState, metrics: Metrics) -> StreamState:
    """The first state. Called inside the fold's transaction; resolves what the old state held open."""
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
        if incident.evidence.goodput is None:  # the watch over goodput keeps its own state
            incidents.move(session, incident.id, "resolved", f"{reason} ({error})", now)
    return StreamState()
