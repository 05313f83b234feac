"""The streams in service, for the false-alarm rate of the fleet (driftguard.detection.fleet)."""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy.orm import Session

from driftguard.detection import Fleet
from driftguard.status.staleness import SURELY_STALE
from driftguard.status.verdict import in_service
from driftguard.store import incidents, status_queries
from driftguard.store.streams import StreamRow


def gather(session: Session, known: Sequence[StreamRow]) -> Fleet:
    """`known`: all streams. Not counted are streams without speculation, which cannot raise an alarm, and
    streams that fell silent a week before the newest record of all."""
    if not known:
        return Fleet(0, {})
    since = max(stream.last_seen_at for stream in known) - SURELY_STALE
    watched = {stream.id for stream in known if stream.method != "none" and stream.last_seen_at >= since}
    serving = in_service(known, status_queries.drafts_in_service(session)) & watched
    named: dict[int, float] = {}
    for stream_id, evidence in incidents.opened_by_detector(session):
        if stream_id in serving:
            named[stream_id] = max(named.get(stream_id, 0.0), evidence.false_alarm_factor)
    return Fleet(len(serving), named)
