"""What speculation costs a stream: gathered from the store, computed purely, kept.

With an incident as it opens, and for every stream in service every few minutes, which completes an incident
that opened before its cost could be told.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Final

import msgspec
import structlog
from sqlalchemy.orm import Session

from driftguard.cost import Cost, TimedRequest, assess
from driftguard.store import incidents, speeds, stream_costs, streams
from driftguard.store.database import Database
from driftguard.store.tables import Incident, Stream

MEASURE_EVERY: Final = timedelta(minutes=10)
OUTDATED_AFTER: Final = 6 * MEASURE_EVERY  # with traffic that was not measured
_AT_A_TIME: Final = 10  # streams: about a twentieth of a second each
_NEWEST: Final = 2**62  # above every seq
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Change:
    """`change_point` and `newest`: seq of the first record after it and of the last one to look at.
    `at`: when that first record ended."""

    change_point: int
    at: datetime
    newest: int
    segments: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Measured:
    at: datetime
    cost: Cost


def at_change(
    session: Session, stream: Stream, change: Change, newest_ended_at: datetime
) -> tuple[Cost | None, float | None]:
    """(what the change costs, draft tokens per step in the changed segments); None where no record tells."""
    before = speeds.between(session, stream.id, 0, change.change_point, change.at)
    after = speeds.between(session, stream.id, change.change_point, change.newest + 1, newest_ended_at)
    without = speeds.without_speculation(session, stream, change.newest + 1, newest_ended_at)
    changed = [item for item in [*before, *after] if item.segment in change.segments]
    cost = _assessed(stream, before, after, without, change.segments)
    return cost, _drafted_per_step(changed)


def refresh(database: Database, now: datetime) -> None:
    """Measures the streams that waited longest, a few at a time, each in a transaction of its own."""
    with database.session() as session:
        outdated = stream_costs.outdated(session, now - MEASURE_EVERY, limit=_AT_A_TIME)
        waiting = [stream.id for stream in outdated]
    for stream_id in waiting:
        with database.session() as session:
            if stream := streams.get_stream(session, stream_id):
                incident = _unresolved(session, stream_id)
                cost = _now(session, stream, incident)
                stream_costs.store(session, stream_id, msgspec.to_builtins(cost), now)
                if incident:
                    _complete(incident, cost)


def evidence_of(cost: Cost | None) -> dict[str, Any]:
    """What an incident keeps of its cost; the slowdown only where it is sure that there is one, or a gain."""
    lost = cost.lost if cost else None
    sure = lost is not None and lost.low * lost.high > 0.0
    return {"slowdown_measured": lost.value if lost and sure else None, "cost": msgspec.to_builtins(cost)}


def _complete(incident: Incident, cost: Cost | None) -> None:
    """A large fall is found before its cost can be told: once there are enough requests, it is."""
    evidence, measured = incident.evidence, evidence_of(cost)
    if cost is None or evidence["slowdown_measured"] is not None:
        return
    # An incident of a replaced target opens without a cost.
    if evidence.get("cost") is not None and measured["slowdown_measured"] is None:
        return
    incident.evidence = {**evidence, **measured}
    incident.tokens_per_second_before = cost.before.tokens_per_second if cost.before else None
    incident.tokens_per_second_after = cost.now.tokens_per_second


def known(session: Session) -> dict[int, Measured]:
    """stream id -> as it was last measured."""
    return {
        row.stream_id: Measured(row.measured_at, msgspec.convert(row.cost, Cost))
        for row in stream_costs.measured(session)
    }


def is_outdated(stream: Stream, measured_at: datetime | None) -> bool:
    """Where the newest requests were not measured for long: their K may be another by now."""
    return measured_at is None or stream.last_seen_at - measured_at > OUTDATED_AFTER


def _unresolved(session: Session, stream_id: int) -> Incident | None:
    """Of a fall first."""
    own = {incident.direction: incident for incident in incidents.unresolved_of(session, stream_id)}
    return own.get("down") or own.get("up")


def _now(session: Session, stream: Stream, incident: Incident | None) -> Cost | None:
    """Against the time before the change of an incident, if there is one."""
    if incident:
        segments = tuple(str(segment["segment"]) for segment in incident.segments)
        change = Change(incident.change_point_seq, incident.change_point_at, _NEWEST, segments)
        return at_change(session, stream, change, stream.last_seen_at)[0]
    newest = speeds.between(session, stream.id, 0, _NEWEST, stream.last_seen_at)
    without = speeds.without_speculation(session, stream, _NEWEST, stream.last_seen_at)
    return _assessed(stream, [], newest, without, None)


def _assessed(
    stream: Stream,
    before: Sequence[TimedRequest],
    now: Sequence[TimedRequest],
    without: Sequence[TimedRequest],
    changed: Sequence[str] | None,
) -> Cost | None:
    """None, and logged, where it fails or gives numbers that JSON cannot hold: what an incident costs must
    not keep it, and the batch that it was found in, from being stored."""
    try:
        cost = assess(before, now, without, changed=changed)
        json.dumps(msgspec.to_builtins(cost), allow_nan=False)
    except Exception:
        log.exception("the cost of speculation could not be computed", stream=stream.id)
        return None
    return cost


def _drafted_per_step(requests: Sequence[TimedRequest]) -> float | None:
    drafted, steps = sum(item.drafted for item in requests), sum(item.steps for item in requests)
    return drafted / steps if drafted and steps else None
