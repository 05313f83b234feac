"""A fallen segment that sends nothing any more: is its fall over, or does it go on under another name?

Where the detector sees a segment fall silent while another one has no baseline yet, that one may be the same
under another name (`renamed_segment.py`), and the fall would go on in it. So the incident waits until that is
known. The detector does not watch for the silence of segments that a comparison found: here it is seen.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from datetime import datetime
from typing import Final

from sqlalchemy.orm import Session

from driftguard.incidents import renamed_segment
from driftguard.incidents.found_back import is_asked
from driftguard.incidents.opening import SILENT, come_back
from driftguard.store import folding, incidents, renamed_segments
from driftguard.store.tables import Incident, Stream

REQUESTS: Final = 8_192  # of the stream without one of the segment: as many as the detector waits for


def over(session: Session, incident: Incident) -> list[str]:
    """Segments of a fall that is not resolved which are silent, and which none that could be known better
    soon may have taken the place of."""
    if incident.direction != "down":
        return []
    asked = [each for each in incident.segments if each.back_at is None and is_asked(incident, each)]
    if not asked:
        return []
    newest = renamed_segments.newest_of_segments(session, incident.stream_id, REQUESTS)
    silent = [
        each.segment
        for each in asked
        if (each.segment not in newest.seqs and newest.requests == REQUESTS)
        or (each.silent_at is not None and newest.seqs.get(each.segment, 0) <= each.silent_at)
    ]
    return [] if _may_go_on(session, incident.stream_id, silent) else silent


def end(session: Session, stream: Stream, incident: Incident, silent: Sequence[str], now: datetime) -> None:
    """Of an incident, locked by the caller, that is not resolved; `silent` as `over` says."""
    if silent:
        reason = SILENT.format(", ".join(silent))
        come_back(session, incident, silent, reason, now, stream.last_seen_at, is_back=False)


def wait(session: Session, incident: Incident, young: Collection[str], seq: int, now: datetime) -> bool:
    """Has an incident, locked by the caller, wait where `young` segments have no baseline yet, or one has
    that awaits its comparison: what the detector has found silent at this seq may go on in them. Whether it
    waits. The fold calls it, so it reads no history: whether one of them has taken the place is asked by
    `over`."""
    waiting = [
        each.segment for each in incident.segments if each.back_at is None and not is_asked(incident, each)
    ]
    if not waiting or not (young or incidents.awaits_comparison(session, incident.stream_id)):
        return False
    incident.segments = tuple(
        replace(each, silent_at=seq) if each.segment in waiting else each for each in incident.segments
    )
    reason = f"{SILENT.format(', '.join(waiting))}; whether they go on under another name is not known yet"
    incidents.note(session, incident, reason, now)
    return True


def _may_go_on(session: Session, stream_id: int, silent: Collection[str]) -> bool:
    """Whether a segment has taken the place of one of these that has no baseline yet, or was not compared."""
    if not silent:
        return False
    if incidents.awaits_comparison(session, stream_id):
        return True
    summary = folding.summaries(session, [stream_id]).get(stream_id, {})
    young = {each["segment"] for each in summary.get("segments", ()) if each["requests_needed"] > 0}
    return bool(young) and renamed_segment.has_taken_a_place(session, stream_id, silent, young)
