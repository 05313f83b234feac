"""A stored detector state that this version cannot read: its stream begins anew, and says why."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Final

import structlog
from sqlalchemy.orm import Session

from driftguard.detection import OtherVersion, StreamState, UnreadableState
from driftguard.metrics import Metrics
from driftguard.store import incidents

OTHER_VERSION: Final = "stored by another version of DriftGuard; baselines are relearned"
DAMAGED: Final = "the stored detector state is damaged; baselines are relearned"
log = structlog.get_logger(__name__)


def begin_anew(session: Session, stream_id: int, error: UnreadableState, metrics: Metrics) -> StreamState:
    """The first state. Called inside the fold's transaction; resolves what the old state held open."""
    if isinstance(error, OtherVersion):  # what an upgrade brings about: nothing is broken
        reason = OTHER_VERSION
        log.warning(reason, stream=stream_id, error=str(error))
        metrics.detector_states_of_other_version.inc()
    else:
        reason = DAMAGED
        log.error(reason, stream=stream_id, error=str(error))
        metrics.detector_states_lost.inc()
    for incident in incidents.unresolved_of(session, stream_id):
        incidents.move(session, incident.id, "resolved", f"{reason} ({error})", datetime.now(UTC))
    return StreamState()
