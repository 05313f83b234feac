"""The streams in service, for what concerns all of them together (driftguard.detection.fleet)."""

from __future__ import annotations

from typing import Final

from sqlalchemy.orm import Session

from driftguard.detection import Fleet
from driftguard.status import in_service
from driftguard.store import incidents, status, streams

FACTOR: Final = "false_alarm_factor"  # in an incident's evidence: what the stream's own A was multiplied by


def gather(session: Session) -> Fleet:
    """Streams without speculation have nothing that could be named: they do not count."""
    known = streams.all_streams(session)
    serving = in_service(known, status.drafts_in_service(session))
    serving -= {stream.id for stream in known if stream.method == "none"}
    named: dict[int, float] = {}
    for stream_id, evidence in incidents.opened_by_detector(session):
        if stream_id in serving:
            named[stream_id] = max(named.get(stream_id, 0.0), float(evidence.get(FACTOR, 1.0)))
    return Fleet(len(serving), named)
