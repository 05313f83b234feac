"""What speculation costs a stream: gathered from the store, computed purely, kept.

With an incident as it opens, and for every stream in service every few minutes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import msgspec
from sqlalchemy.orm import Session

from driftguard.cost import Cost, TimedRequest, assess
from driftguard.store import speeds, status, stream_costs
from driftguard.store.tables import Incident, Stream

MEASURE_EVERY: Final = timedelta(minutes=10)
_AT_A_TIME: Final = 10  # streams: about a twentieth of a second each
_NEWEST: Final = 2**62  # above every seq


@dataclass(frozen=True, slots=True)
class Change:
    """`change_point` and `newest`: seq of the first record after it and of the last one to look at."""

    change_point: int
    newest: int
    segments: tuple[str, ...]


def at_change(
    session: Session, stream: Stream, change: Change, newest_ended_at: datetime
) -> tuple[Cost | None, float | None]:
    """(what the change costs, draft tokens per step in the changed segments); None where no record tells."""
    before = speeds.between(session, stream.id, 0, change.change_point, newest_ended_at)
    after = speeds.between(session, stream.id, change.change_point, change.newest + 1, newest_ended_at)
    without = speeds.without_speculation(session, stream, change.newest + 1, newest_ended_at)
    changed = [item for item in [*before, *after] if item.segment in change.segments]
    return assess(before, after, without, changed=change.segments), _drafted_per_step(changed)


def refresh(session: Session, now: datetime) -> None:
    """Measures the streams that waited longest, a few at a time."""
    outdated = stream_costs.outdated(session, now - MEASURE_EVERY, limit=_AT_A_TIME)
    unresolved = status.unresolved_incidents(session) if outdated else {}
    for stream in outdated:
        of_stream = unresolved.get(stream.id, {})
        cost = _now(session, stream, of_stream.get("down") or of_stream.get("up"))
        stream_costs.store(session, stream.id, msgspec.to_builtins(cost), now)


def known(session: Session) -> dict[int, Cost]:
    """stream id -> as it was last measured."""
    return {
        stream_id: msgspec.convert(cost, Cost) for stream_id, cost in stream_costs.measured(session).items()
    }


def _now(session: Session, stream: Stream, incident: Incident | None) -> Cost | None:
    if incident is not None:
        segments = tuple(str(segment["segment"]) for segment in incident.segments)
        change = Change(incident.change_point_seq, _NEWEST, segments)
        return at_change(session, stream, change, stream.last_seen_at)[0]
    newest = speeds.between(session, stream.id, 0, _NEWEST, stream.last_seen_at)
    return assess([], newest, speeds.without_speculation(session, stream, _NEWEST, stream.last_seen_at))


def _drafted_per_step(requests: Sequence[TimedRequest]) -> float | None:
    drafted, steps = sum(item.drafted for item in requests), sum(item.steps for item in requests)
    return drafted / steps if drafted and steps else None
