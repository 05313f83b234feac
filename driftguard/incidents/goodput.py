"""Incidents of goodput: tokens come slower at the same load, or speculation loses at the load there is now.

Every few minutes the watch of each stream reads the requests since its last look (driftguard.cost.goodput).
What it finds opens an incident of direction "slower", at most one per stream, which is examined and told as
any other (`examination.py`); it never retrains. A further fall while it is open is told in it. A fall that an
open incident of acceptance explains is that one's: its cost is measured with it (`cost_measurement.py`).

A person who resolves an incident of slower tokens takes the present speed for normal: it is learned anew.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Final, Literal
from uuid import UUID, uuid5

import structlog
from sqlalchemy.orm import Session

from driftguard.cost import Cost, TimedRequest, payoff
from driftguard.cost import goodput as watching
from driftguard.cost.goodput import Fall
from driftguard.cost.payoff import Speculation, load_text
from driftguard.diagnosis.comparisons import LEVEL, Pair, acceptance_of, combined_difference, rate_of
from driftguard.incidents import cost_measurement, opening
from driftguard.incidents.cost_measurement import Change, Measurement
from driftguard.incidents.open_goodput import Further, follow, learned_anew
from driftguard.incidents.opening import Paging
from driftguard.records.documents.goodput import AcceptanceMove, GoodputChange, GoodputWatch, Rivalry, Watched
from driftguard.records.documents.incident import ChangedSegment, IncidentEvidence
from driftguard.store import goodput_watches, incidents, streams
from driftguard.store.database import CHORE, Database, each_apart
from driftguard.store.tables import ABOVE_EVERY_SEQ, Incident, Stream

LOOK_EVERY: Final = timedelta(minutes=5)
_AT_A_TIME: Final = 10  # streams
_MATTERS: Final = 0.03  # of acceptance: "did not move" is said where the interval excludes such a move
_EXPLAINS: Final = 0.5  # of a fall of goodput, by fewer tokens per step: then it is one of acceptance
_NAMESPACE: Final = UUID("0b1d9f43-6a0e-4e7e-9b57-2f2d8f6b4c11")
log = structlog.get_logger(__name__)


def refresh(
    database: Database,
    paging: Paging,
    now: datetime,
    *,
    false_alarm_days: float,
    on_opened: Callable[[], None] = lambda: None,
) -> None:
    """Looks at the streams that waited longest, a few at a time, each in transactions of its own: raises what
    the first that failed raised, after all the others (`each_apart`). `false_alarm_days`: to be expected
    between two false alarms of one stream, at least. `on_opened`: called after an incident was stored, which
    awaits its examination."""
    with database.session(CHORE) as session:
        waiting = [stream.id for stream in goodput_watches.due(session, LOOK_EVERY, now, limit=_AT_A_TIME)]

    def look_at(stream_id: int) -> None:
        if look(database, stream_id, paging, now, false_alarm_days):
            on_opened()

    each_apart(waiting, look_at, _tell_failure)


def _tell_failure(stream_id: int) -> None:
    log.exception("a look at the goodput of a stream failed", stream=stream_id)


def look(database: Database, stream_id: int, paging: Paging, now: datetime, false_alarm_days: float) -> bool:
    """Whether an incident opened. The requests are read before the watch is locked; another sidecar that was
    faster leaves nothing to do."""
    with database.session(CHORE) as session:
        stream = streams.get_stream(session, stream_id)
        if stream is None:
            return False
        before = goodput_watches.known(session, stream_id)
        read = goodput_watches.after(session, stream, before.seq)
        watch = _read(before, read)
        speculation = _speculation(session, stream)
        found = _found(session, stream, watch, speculation, now, false_alarm_days)
    with database.session(CHORE) as session:
        if goodput_watches.lock(session, stream_id).seq != before.seq:
            return False
        watch, opened = _decided(session, stream, watch, found, speculation, paging, now)
        goodput_watches.store(session, stream_id, watch, now)
    return opened


def _read(before: GoodputWatch, read: Sequence[watching.Numbered]) -> GoodputWatch:
    """Requests that make no block wait for more. Where as many wait as a look reads, the older half is given
    up: their times may say nothing. Not all of them, as those of a busy stream, seen at every look, may span
    a little less than a block."""
    watch = watching.fold(before, read)
    if watch.seq == before.seq and len(read) >= goodput_watches.MOST_READ // 2:
        return replace(watch, seq=read[len(read) // 2].seq)
    return watch


def _speculation(session: Session, stream: Stream) -> tuple[Speculation, Cost | None]:
    """At the load there is now, as last measured."""
    found = cost_measurement.known(session, [stream.id]).get(stream.id)
    if found is None:
        return payoff(None), None
    outdated = cost_measurement.is_outdated(stream.last_seen_at, found.at)
    return payoff(found.cost, outdated=outdated), found.cost


@dataclass(frozen=True, slots=True)
class _Found:
    """An incident to open, and what the watch keeps of it."""

    incident: Incident
    opened: Watched
    reason: str
    is_back: bool = False  # by now


_Finding = _Found | Further | Literal["explained"] | None


def _found(
    session: Session,
    stream: Stream,
    watch: GoodputWatch,
    speculation: tuple[Speculation, Cost | None],
    now: datetime,
    days: float,
) -> _Finding:
    """ "explained": by an open fall of acceptance."""
    level = watching.alarm_level(days)
    fallen = any(one.direction == "down" for one in incidents.of_stream(session, stream.id))
    if (fall := watching.fall_of(watch, level)) is not None:
        first = fall.blocks[0]
        change = _change(first.first_seq, first.first_at, fall)
        measured = cost_measurement.measure(session, stream, change, stream.last_seen_at)
        if fallen and _is_of_acceptance(measured.cost, fall.slower - watching.known_slower(watch)):
            return "explained"
        if watch.opened is not None:
            return Further(fall, measured.cost)
        incident = _slower(stream, watch, fall, measured, now, days)
        reason = f"tokens come about {fall.lost:.0%} slower than before {load_text(fall.concurrency)}"
        return _Found(incident, Watched(incident.id, "slower", slower=fall.slower), reason, fall.is_back)
    told, cost = speculation
    if told.state != "loses" or cost is None or fallen:
        return None
    rivalry = watching.losing_in(watch, level, told.concurrency)
    if rivalry is None:
        return None
    incident = _loses(session, stream, rivalry, told, cost, now, days)
    return _Found(incident, Watched(incident.id, "speculation_loses"), told.text)


def _decided(
    session: Session,
    stream: Stream,
    watch: GoodputWatch,
    found: _Finding,
    speculation: tuple[Speculation, Cost | None],
    paging: Paging,
    now: datetime,
) -> tuple[GoodputWatch, bool]:
    if watch.begun_at is None:
        watch = replace(watch, begun_at=now)
    elif incidents.accepted_since(session, stream.id, watch.begun_at):
        log.info("goodput is learned anew, as a new level was accepted", stream=stream.id)
        return learned_anew(watch, now), False
    if watch.opened is not None:
        further = None if isinstance(found, _Found) else found
        return follow(session, stream, watch, watch.opened, further, speculation, paging, now), False
    if found == "explained":
        return replace(watch, alarmed=True), False
    if not isinstance(found, _Found):
        return watch, False
    goodput = found.incident.evidence.goodput
    if watch.alarmed and found.is_back:  # with the incident of acceptance that explained it
        return watching.closed(watch), False
    if watch.alarmed and goodput is not None and goodput.by_acceptance:
        # The incident of acceptance that explained it has ended, and what it was about has not.
        return learned_anew(watch, now), False
    opening.open_incident(session, found.incident, found.reason)
    return watching.with_opened(watch, found.opened), True


def _change(seq: int, at: float, fall: Fall) -> Change:
    counts: dict[str, float] = defaultdict(float)
    for block in fall.blocks:
        for cell in block.cells:
            counts[cell.segment] += cell.weight
    names = tuple(sorted(counts, key=lambda name: (-counts[name], name)))
    return Change(seq, datetime.fromtimestamp(at, UTC), ABOVE_EVERY_SEQ, names)


def _is_of_acceptance(cost: Cost | None, slower: float) -> bool:
    """Whether fewer tokens per step are most of the fall; taken so where it cannot be told. `slower`: mean
    of the logarithm of the time per token, against just before it."""
    if cost is None or cost.before is None:
        return True
    fewer = math.log(cost.before.tokens_per_step / cost.now.tokens_per_step)
    return fewer >= _EXPLAINS * slower


def _slower(
    stream: Stream, watch: GoodputWatch, fall: Fall, measured: Measurement, now: datetime, days: float
) -> Incident:
    first = fall.blocks[0]
    cost = measured.cost
    change = GoodputChange(
        kind="slower",
        concurrency=fall.concurrency,
        lost=fall.lost,
        requests=int(sum(cell.weight for block in fall.blocks for cell in block.cells)),
        acceptance="not_shown",
        false_alarm_days=days,
        by_acceptance=cost is not None and cost.before is not None and _is_of_acceptance(cost, fall.slower),
    )
    incident = _incident(stream, first.first_seq, first.first_at, watch.seq, measured, change, now)
    incident.interval_end_at = datetime.fromtimestamp(first.last_at, UTC)
    incident.tokens_per_second_before = cost.before.tokens_per_second if cost and cost.before else None
    incident.tokens_per_second_after = cost.now.tokens_per_second if cost else None
    incident.evidence = cost_measurement.with_cost(incident.evidence, cost)
    return incident


def _loses(
    session: Session,
    stream: Stream,
    rivalry: Rivalry,
    told: Speculation,
    cost: Cost,
    now: datetime,
    days: float,
) -> Incident:
    seq, at = rivalry.since_seq or 0, rivalry.since_at or 0.0
    change = Change(seq, datetime.fromtimestamp(at, UTC), ABOVE_EVERY_SEQ, ())
    measured = cost_measurement.measure(session, stream, change, stream.last_seen_at)
    goodput = GoodputChange(
        kind="speculation_loses",
        concurrency=told.concurrency,
        lost=max(1.0 - told.factor.value, 0.0) if told.factor else 0.0,
        requests=len(measured.since),
        acceptance="not_shown",
        false_alarm_days=days,
        factor=told.factor,
    )
    incident = _incident(stream, seq, at, seq, measured, goodput, now)
    incident.tokens_per_second_after = told.tokens_per_second
    incident.evidence = replace(incident.evidence, cost=cost, slowdown_measured=goodput.lost)
    return incident


def _incident(
    stream: Stream,
    seq: int,
    at: float,
    opened_seq: int,
    measured: Measurement,
    goodput: GoodputChange,
    now: datetime,
) -> Incident:
    changed_at = datetime.fromtimestamp(at, UTC)
    segments, moved = _acceptance(measured)
    total = sum(one.after.requests for one in segments)
    before, after = (
        sum(level.rate * one.after.requests for one, level in levels) / total if total else 0.0
        for levels in ([(one, one.before) for one in segments], [(one, one.after) for one in segments])
    )
    return Incident(
        id=uuid5(_NAMESPACE, f"{stream.id}/{goodput.kind}/{seq}"),
        stream_id=stream.id,
        direction="slower",
        opened_at=now,
        opened_seq=opened_seq,
        change_point_seq=seq,
        change_point_at=changed_at,
        interval_start_at=changed_at,
        interval_end_at=changed_at,
        acceptance_before=before,
        acceptance_after=after,
        segments=segments,
        evidence=IncidentEvidence(goodput=replace(goodput, acceptance=moved)),
    )


def _acceptance(measured: Measurement) -> tuple[tuple[ChangedSegment, ...], AcceptanceMove]:
    """Of every segment since the change, most requests first; and whether it moved."""
    before, since = (_by_segment(side) for side in (measured.before, measured.since))
    every = [counts for requests in before.values() for counts in requests]
    segments, pairs = [], []
    for name, requests in sorted(since.items(), key=lambda item: -len(item[1])):
        after, own = rate_of(requests), rate_of(before.get(name, []))
        if after is None:
            continue
        if own is not None:
            pairs.append(Pair(own, after))
        # A segment that came new is compared with all before.
        level = own or rate_of(every) or after
        segments.append(ChangedSegment(name, acceptance_of(level), acceptance_of(after)))
    change = combined_difference(pairs)
    if change is None:
        return tuple(segments), "not_shown"
    if change.excludes(_MATTERS):
        return tuple(segments), "none"
    if change.p_value > LEVEL:
        return tuple(segments), "not_shown"
    return tuple(segments), "fell" if change.change < 0.0 else "rose"


def _by_segment(requests: Sequence[TimedRequest]) -> dict[str, list[tuple[int, int]]]:
    found: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for item in requests:
        found[item.segment].append((item.drafted, item.accepted))
    return found
