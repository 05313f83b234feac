"""What speculation costs a stream: gathered from the store, computed purely, kept.

With an incident as it is examined, and for every stream in service every few minutes: an open incident is
then told what it costs by now. A new one, which is found before enough requests were timed, waits a minute
only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final

import msgspec
import structlog
from sqlalchemy.orm import Session

from driftguard.cost import Cost, TimedRequest, assess
from driftguard.incidents import cost_update
from driftguard.incidents.cost_update import Measurement
from driftguard.incidents.severity import Paging
from driftguard.records.documents.incident import names_of
from driftguard.store import examination_evidence, incidents, stream_costs, streams
from driftguard.store.column_types import refuse_not_finite
from driftguard.store.database import CHORE, Database
from driftguard.store.tables import Incident, Stream

MEASURE_EVERY: Final = timedelta(minutes=10)
MEASURE_NEW_EVERY: Final = timedelta(minutes=1)  # of streams with an incident that lacks its cost,
NEW_FOR: Final = timedelta(minutes=30)  # for so long after it opened
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
    found = _measured(session, stream, change, newest_ended_at)
    changed = [item for item in [*found.before, *found.since] if item.segment in change.segments]
    return found.cost, cost_update.drafted_per_step(changed)


def refresh(database: Database, paging: Paging, now: datetime) -> None:
    """Measures the streams whose incident waits for it and those that waited longest, a few of either at a
    time, each in transactions of its own. What it costs by now may make an open incident graver."""
    with database.session(CHORE) as session:
        awaited = stream_costs.awaited(session, now - NEW_FOR, now - MEASURE_NEW_EVERY, limit=_AT_A_TIME)
        outdated = stream_costs.outdated(session, now - MEASURE_EVERY, limit=_AT_A_TIME)
        waiting = dict.fromkeys(stream.id for stream in [*awaited, *outdated])
    for stream_id in waiting:
        with database.session(CHORE) as session:
            stream = streams.get_stream(session, stream_id)
            if stream is None:
                continue
            incident = _unresolved(session, stream_id)
            found = _now(session, stream, incident)
        with database.session(CHORE) as session:  # short: the fold waits for an incident that is locked
            stream_costs.store(session, stream_id, found.cost, now)
            present = incidents.lock(session, incident.id) if incident else None
            if present is not None and present.state != "resolved":
                cost_update.update(session, present, found, paging, now)


def known(session: Session, stream_ids: Sequence[int]) -> dict[int, Measured]:
    """stream id -> as it was last measured."""
    return {
        row.stream_id: Measured(row.measured_at, row.cost)
        for row in stream_costs.measured(session, stream_ids)
        if row.cost is not None
    }


def is_outdated(last_seen_at: datetime, measured_at: datetime | None) -> bool:
    """Where the newest requests were not measured for long: their K may be another by now. `last_seen_at`:
    of the stream."""
    return measured_at is None or last_seen_at - measured_at > OUTDATED_AFTER


def _unresolved(session: Session, stream_id: int) -> Incident | None:
    """Of a fall first; one that awaits its examination is measured there."""
    own = {
        incident.direction: incident
        for incident in incidents.of_stream(session, stream_id)
        if not incident.awaits_examination
    }
    return own.get("down") or own.get("up")


def _now(session: Session, stream: Stream, incident: Incident | None) -> Measurement:
    """Against the time before the change of an incident, if there is one."""
    if incident:
        segments = names_of(incident.segments)
        change = Change(incident.change_point_seq, incident.change_point_at, _NEWEST, segments)
        return _measured(session, stream, change, stream.last_seen_at)
    newest = examination_evidence.timed_between(session, stream.id, 0, _NEWEST, stream.last_seen_at)
    without = examination_evidence.without_speculation(session, stream, _NEWEST, stream.last_seen_at)
    return Measurement(_assessed(stream, [], newest, without, None), [], newest)


def _measured(session: Session, stream: Stream, change: Change, newest_ended_at: datetime) -> Measurement:
    before = examination_evidence.timed_between(session, stream.id, 0, change.change_point, change.at)
    since = examination_evidence.timed_between(
        session, stream.id, change.change_point, change.newest + 1, newest_ended_at
    )
    without = examination_evidence.without_speculation(session, stream, change.newest + 1, newest_ended_at)
    return Measurement(_assessed(stream, before, since, without, change.segments), before, since)


def _assessed(
    stream: Stream,
    before: Sequence[TimedRequest],
    now: Sequence[TimedRequest],
    without: Sequence[TimedRequest],
    changed: Sequence[str] | None,
) -> Cost | None:
    """None, and logged, where it fails or gives numbers that cannot be stored: what an incident costs must
    not keep it, and the batch that it was found in, from being stored."""
    try:
        cost = assess(before, now, without, changed=changed)
        refuse_not_finite(msgspec.to_builtins(cost), "cost")
    except Exception:
        log.exception("the cost of speculation could not be computed", stream=stream.id)
        return None
    return cost
