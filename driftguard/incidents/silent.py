"""A fallen segment that sends nothing any more: is its fall over, or does it go on under another name?

Where the detector sees a segment fall silent while another one has no baseline yet, that one may be the same
under another name (`renamed_segment.py`), and the fall would go on in it. So the incident waits until that is
known. The detector does not watch for the silence of segments that a comparison found: here it is seen.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Final

from sqlalchemy.orm import Session

from driftguard.incidents import renamed_segment
from driftguard.incidents.found_back import is_asked
from driftguard.incidents.opening import SILENT, come_back
from driftguard.store import folding, incidents, renamed_segments
from driftguard.store.tables import Incident, Stream

LEAST_REQUESTS: Final = 30  # under an older name, and none under the newer one: it is set back
REQUESTS: Final = 8_192  # of the stream without one of the segment: as many as the detector waits for


@dataclass(frozen=True, slots=True)
class Silent:
    """Segments of a fall: `over`, as they send nothing any more, and those whose older name is used again."""

    over: Sequence[str] = ()
    set_back: Sequence[str] = ()


def silent(session: Session, incident: Incident) -> Silent:
    """Of a fall that is not resolved. Not over is what a segment may have taken the place of that could be
    known better soon."""
    asked = [each for each in incident.segments if each.back_at is None and is_asked(incident, each)]
    if incident.direction != "down" or not asked:
        return Silent()
    newest = renamed_segments.newest(session, incident.stream_id, REQUESTS)
    last = {one.segment: one.seq for one in newest}  # the newest one counts
    set_back = [
        each.segment
        for each in asked
        if sum(one.segment in each.renamed_from and one.seq > last.get(each.segment, 0) for one in newest)
        >= LEAST_REQUESTS
    ]
    over = [
        each.segment
        for each in asked
        if (each.segment not in last and len(newest) == REQUESTS)
        or (each.silent_at is not None and last.get(each.segment, 0) <= each.silent_at)
    ]
    may_go_on = _may_go_on(session, incident.stream_id, over)
    return Silent([] if may_go_on else [name for name in over if name not in set_back], set_back)


def end(session: Session, stream: Stream, incident: Incident, found: Silent, now: datetime) -> None:
    """Of an incident, locked by the caller, that is not resolved; `found` as `silent` says."""
    if found.set_back:
        _set_back(session, stream, incident, found.set_back, now)
    if found.over:
        reason = SILENT.format(", ".join(found.over))
        come_back(session, incident, found.over, reason, now, stream.last_seen_at, is_back=False)


def _set_back(
    session: Session, stream: Stream, incident: Incident, names: Sequence[str], now: datetime
) -> None:
    """The older names are asked again, between the levels of the newer ones, whose places they take."""
    again = {
        older: each for each in incident.segments if each.segment in names for older in each.renamed_from
    }
    own = {each.segment: each for each in incident.segments}
    others = (each for name, each in own.items() if name not in again)
    incident.segments = (
        *(replace(each, back_at=stream.last_seen_at) if each.segment in names else each for each in others),
        *(
            replace(own[older], back_at=None, silent_at=incident.opened_seq)
            if older in own
            else replace(each, segment=older, renamed_from=(), silent_at=incident.opened_seq)
            for older, each in again.items()
        ),
    )
    reason = f"segment{'s' * (len(again) > 1)} {', '.join(again)} took the place of {', '.join(names)} again"
    incidents.note(session, incident, reason, now)


def wait(session: Session, incident: Incident, young: Collection[str], seq: int, now: datetime) -> bool:
    """Has an incident, locked by the caller, wait where `young` segments have no baseline yet, or one has
    that awaits its comparison: what the detector has found silent at this seq may go on in them. Whether it
    waits. The fold calls it, so it reads no history: whether one of them has taken the place is asked by
    `silent`."""
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
