"""What speculation costs a stream: gathered from the store, computed purely, kept, and told by its incident.

With an incident as it is examined, and for every stream in service every few minutes: an open incident is
then told what it costs by now. A new one, which is found before enough requests were timed, waits a minute
only, and so does a new stream, such as that of a draft just promoted.

The detector finds no second fall of a segment while one is open, and that of another perhaps later than it
costs something. So a further fall of the changed segments is told here, the other segments are looked at as
well, and a fall that was no page becomes one when either costs enough. That is judged every few minutes for
as long as the incident is open, hence by the loss, measured or by formula, less SURELY standard errors: the
first measurement that shows a small loss at all shows too much of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Final

import msgspec
import structlog
from sqlalchemy.orm import Session

from driftguard.cost import Cost, TimedRequest, assess
from driftguard.diagnosis.comparisons import QUANTILE_95, Rate, acceptance_of, decompose, rate_of
from driftguard.incident_lifecycle import formula_slowdown
from driftguard.incidents import across_settings, found_back, remedy, silent
from driftguard.incidents.opening import Paging, fall_further, raise_to, severity_of, why_no_repetition
from driftguard.records.documents.incident import (
    IncidentEvidence,
    Rollback,
    changed_since,
    going_on,
    names_of,
    not_back,
)
from driftguard.store import drafts, examination_evidence, incidents, retrain_runs, stream_costs, streams
from driftguard.store.column_types import refuse_not_finite
from driftguard.store.database import CHORE, Database, each_apart
from driftguard.store.tables import ABOVE_EVERY_SEQ, Incident, Stream

MEASURE_EVERY: Final = timedelta(minutes=10)
MEASURE_NEW_EVERY: Final = timedelta(minutes=1)  # of streams that lack their cost, or whose incident does,
NEW_FOR: Final = timedelta(minutes=30)  # for so long after they began, or it opened
OUTDATED_AFTER: Final = 6 * MEASURE_EVERY  # with traffic that was not measured
_AT_A_TIME: Final = 10  # streams: about a twentieth of a second each
SURELY: Final = 3.0
FURTHER: Final = 0.05  # of acceptance: what a segment must lose beyond what its incident says, to be told
_NEWEST_REQUESTS: Final = 200
LEAST_REQUESTS: Final = 30  # of a segment at one K, on either side of the change
_OUTGREW: Final = "more has changed since than its cause explains"
_TOLD: Final = ("now", "before", "lost")  # of the cost of an incident
log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Change:
    """`change_point` and `newest`: seq of the first record after it and of the last one to look at.
    `at`: when that first record ended. `further`: seq of the first record after a further fall: what it costs
    is asked of the time since then. `joined`: segment -> when it changed, of those that changed later."""

    change_point: int
    at: datetime
    newest: int
    segments: tuple[str, ...]
    further: int = 0
    joined: Mapping[str, datetime] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Measured:
    at: datetime
    cost: Cost


def at_change(
    session: Session, stream: Stream, change: Change, newest_ended_at: datetime
) -> tuple[Cost | None, float | None]:
    """(what the change costs, draft tokens per step in the changed segments); None where no record tells."""
    found = measure(session, stream, change, newest_ended_at)
    changed = [item for item in [*found.before, *found.since] if item.segment in change.segments]
    return found.cost, drafted_per_step(changed)


def refresh(database: Database, paging: Paging, now: datetime) -> None:
    """Measures new streams, those whose incident waits for it and those that waited longest, a few of each at
    a time, each in transactions of its own: raises what the first that failed raised, after all the others
    (`each_apart`). What it costs by now may make an open incident graver. Whether segments of it are back
    that a comparison found is asked as well."""
    with database.session(CHORE) as session:
        awaited = stream_costs.awaited(session, now - NEW_FOR, now - MEASURE_NEW_EVERY, limit=_AT_A_TIME)
        outdated = stream_costs.outdated(session, MEASURE_EVERY, now, limit=_AT_A_TIME)
        waiting = dict.fromkeys(stream.id for stream in [*awaited, *outdated])
    each_apart(waiting, lambda stream_id: _refresh(database, stream_id, paging, now), _tell_failure)


def _tell_failure(stream_id: int) -> None:
    log.exception("what speculation costs a stream could not be measured", stream=stream_id)


def _refresh(database: Database, stream_id: int, paging: Paging, now: datetime) -> None:
    with database.session(CHORE) as session:
        stream = streams.get_stream(session, stream_id)
        if stream is None:
            return
        incident = _unresolved(session, stream_id)
        found = _now(session, stream, incident)
        rollback = rollback_of(session, stream, found.cost)
        back = found_back.found_back(session, incident, now) if incident else []
        moved = across_settings.moved(session, incident) if incident else {}
        gone = silent.silent(session, incident) if incident else silent.Silent()
    with database.session(CHORE) as session:  # short: the fold waits for an incident that is locked
        stream_costs.store(session, stream_id, found.cost, now)
        present = incidents.lock(session, incident.id) if incident else None
        if present is not None and present.state != "resolved":
            _tell_further_fall(session, present, found.since, paging, now)
            update_incident(session, present, found, paging, now)
            _end_repetition(session, present, found, paging, now)
            _keep_present(present, found.cost, rollback)
            across_settings.tell(session, present, moved, now)
            found_back.end_where_back(session, present, back, now)
            if present.state != "resolved":
                silent.end(session, stream, present, gone, now)


def rollback_of(session: Session, stream: Stream, cost: Cost | None) -> Rollback | None:
    """None unless the draft of this stream is in service, and has a parent."""
    serving = drafts.in_service(session, stream.server, stream.target)
    if serving is None or serving.version != stream.draft_version:
        return None
    back = drafts.rollback_of(session, stream.server, stream.target, serving.parent_version)
    run = retrain_runs.latest(session, stream.server, stream.target)
    return remedy.rollback_of(back, run, stream.draft_version, cost)


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
    """Of a fall of acceptance first, then of goodput; one that awaits its examination is measured there."""
    own = {
        incident.direction: incident
        for incident in incidents.of_stream(session, stream_id)
        if not incident.awaits_examination
    }
    return own.get("down") or own.get("slower") or own.get("up")


def _now(session: Session, stream: Stream, incident: Incident | None) -> Measurement:
    """Against the time before the change of an incident, if there is one."""
    if incident:
        segments = names_of(going_on(incident.segments))
        goodput = incident.evidence.goodput
        further = goodput.further.seq if goodput is not None and goodput.further is not None else 0
        change = Change(
            incident.change_point_seq,
            incident.change_point_at,
            ABOVE_EVERY_SEQ,
            segments,
            further,
            changed_since([each for each in incident.segments if each.since], incident.change_point_at),
        )
        return measure(session, stream, change, stream.last_seen_at)
    newest = examination_evidence.timed_between(session, stream.id, 0, ABOVE_EVERY_SEQ, stream.last_seen_at)
    without = examination_evidence.without_speculation(session, stream, ABOVE_EVERY_SEQ, stream.last_seen_at)
    return Measurement(_assessed(stream, [], newest, without, None), [], newest)


def measure(session: Session, stream: Stream, change: Change, newest_ended_at: datetime) -> Measurement:
    """The cost of a change, from the requests on both sides of it."""
    before = examination_evidence.timed_between(session, stream.id, 0, change.change_point, change.at)
    since = examination_evidence.timed_between(
        session, stream.id, max(change.change_point, change.further), change.newest + 1, newest_ended_at
    )
    joined = {segment: at.timestamp() for segment, at in change.joined.items()}
    since = [item for item in since if item.ended_at >= joined.get(item.segment, -math.inf)]
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


@dataclass(frozen=True, slots=True)
class Measurement:
    """A stream with an open incident as just measured: `before` and `since` the change, all segments."""

    cost: Cost | None  # of the changed segments that are not back
    before: Sequence[TimedRequest]
    since: Sequence[TimedRequest]


@dataclass(frozen=True, slots=True)
class _Slowdown:
    part: float  # of the tokens per second, lost
    told: str
    # What the incident says of it from then on: the cost that it was measured with, or the part by formula.
    cost: Cost | None = None
    by_formula: float | None = None


def with_cost(evidence: IncidentEvidence, cost: Cost | None) -> IncidentEvidence:
    """What an incident keeps of its cost; the slowdown only where it is sure that there is one, or a gain."""
    return replace(evidence, slowdown_measured=_sure(cost), cost=cost)


def _sure(cost: Cost | None) -> float | None:
    lost = cost.lost if cost else None
    return lost.value if lost is not None and lost.low * lost.high > 0.0 else None


def update_incident(
    session: Session,
    incident: Incident,
    measured: Measurement,
    paging: Paging,
    now: datetime,
) -> None:
    """Completes the cost of an incident, and raises its severity where a fall costs enough by now."""
    if measured.cost is not None and _completes(incident, measured.cost):
        _keep_cost(incident, measured.cost)
    if incident.direction != "up":
        worst = max(_slowdowns(incident, measured), key=lambda item: item.part, default=None)
        if worst is not None:
            graver = severity_of(incident, worst.part, paging)
            if raise_to(session, incident, graver, worst.told, paging, now):
                _keep(incident, worst)
        elif incident.evidence.outgrew_cause and incident.severity == "info":  # as when one opens
            graver = severity_of(incident, incident.evidence.slowdown, paging)
            raise_to(session, incident, graver, _OUTGREW, paging, now)


def _tell_further_fall(
    session: Session, incident: Incident, since: Sequence[TimedRequest], paging: Paging, now: datetime
) -> None:
    """A segment has fallen further whose newest requests accept less than they did since the change, by at
    least FURTHER and SURELY standard errors. That is not asked of a segment that drafts another number of
    tokens per step than it did, as that moves acceptance too."""
    if incident.direction != "down":
        return
    known = dict(incident.evidence.levels)
    fallen = {}
    for each in not_back(incident.segments):
        newest = _newest(since, each.segment)
        rate, k = rate_of((item.drafted, item.accepted) for item in newest), drafted_per_step(newest)
        told = incident.evidence.num_speculative_tokens
        alike = k is not None and told is not None and across_settings.is_same_k(k, told)
        if rate is None or len(newest) < LEAST_REQUESTS or each.after.positions != "all" or not alike:
            continue
        level = acceptance_of(rate)
        before = known.setdefault(each.segment, level)
        error = math.hypot(rate.error, (before.high - before.low) / (2.0 * QUANTILE_95))
        if before.rate - rate.rate >= max(FURTHER, SURELY * error):
            fallen[each.segment] = before, level
            known[each.segment] = level
    if known != incident.evidence.levels:
        incident.evidence = replace(incident.evidence, levels=known)
    if fallen:
        reason = fall_further(session, incident, fallen, now)
        graver = severity_of(incident, incident.evidence.slowdown, paging)
        raise_to(session, incident, graver, reason, paging, now)


def _newest(since: Sequence[TimedRequest], segment: str) -> list[TimedRequest]:
    own = (item for item in since if item.segment == segment and not item.by_first)
    return sorted(own, key=lambda item: item.ended_at)[-_NEWEST_REQUESTS:]


def _end_repetition(
    session: Session,
    incident: Incident,
    measured: Measurement,
    paging: Paging,
    now: datetime,
) -> None:
    """Pages, as what it costs asks for, once the incident no longer repeats the one that it looked like."""
    if not incident.evidence.may_be_usual:
        return
    newest = max((item.ended_at for item in measured.since), default=incident.change_point_at.timestamp())
    slowdown = max((item.part for item in _slowdowns(incident, measured)), default=None)
    differs = why_no_repetition(incident, datetime.fromtimestamp(newest, UTC), slowdown)
    if differs is None or incident.evidence.repeats is None:
        return
    incident.evidence = replace(
        incident.evidence, repeats=replace(incident.evidence.repeats, differs=differs)
    )
    known = incident.evidence.slowdown if slowdown is None else slowdown
    raise_to(session, incident, severity_of(incident, known, paging), differs, paging, now)


def _keep_present(incident: Incident, cost: Cost | None, rollback: Rollback | None) -> None:
    """What is best now follows the load and the acceptance; what the change cost stays as it was told."""
    evidence = replace(incident.evidence, rollback=rollback or incident.evidence.rollback)
    if evidence.cost is not None and cost is not None:
        evidence = replace(
            evidence, cost=replace(cost, **{name: getattr(evidence.cost, name) for name in _TOLD})
        )
    incident.evidence = evidence


def _completes(incident: Incident, cost: Cost) -> bool:
    """A large fall is found before its cost can be told: once there are enough requests, it is."""
    if incident.evidence.slowdown_measured is not None:
        return False
    # An incident of a replaced target opens without a cost.
    return incident.evidence.cost is None or _sure(cost) is not None


def _keep(incident: Incident, slowdown: _Slowdown) -> None:
    if slowdown.cost is not None:
        _keep_cost(incident, slowdown.cost)
    elif slowdown.by_formula is not None:
        incident.evidence = replace(incident.evidence, slowdown_formula=slowdown.by_formula)


def _keep_cost(incident: Incident, cost: Cost) -> None:
    incident.evidence = with_cost(incident.evidence, cost)
    incident.tokens_per_second_before = cost.before.tokens_per_second if cost.before else None
    incident.tokens_per_second_after = cost.now.tokens_per_second


def _slowdowns(incident: Incident, measured: Measurement) -> Iterator[_Slowdown]:
    """Of the changed segments that are not back, measured where it is sure that there is one; of those that
    did not change by formula. Of goodput only as measured, and nothing where speculation loses: that is told
    as it was found."""
    goodput = incident.evidence.goodput
    if goodput is not None and goodput.kind == "speculation_loses":
        return
    changed = set(names_of(going_on(incident.segments)))
    if measured.cost is not None and measured.cost.lost is not None and _sure(measured.cost) is not None:
        lost = measured.cost.lost
        told = f"the changed segments have become about {lost.value:.0%} slower (measured)"
        # The interval reaches about two standard errors down.
        least = lost.value - SURELY / 2.0 * (lost.value - lost.low)
        yield _Slowdown(least, told, cost=measured.cost)
    elif goodput is None and (part := _of_segments(measured, changed)) is not None:
        told = f"the changed segments have become at least {part:.0%} slower (by formula)"
        yield _Slowdown(part, told, by_formula=part)
    # Of what is back, requests of its fall are among those since the change.
    others = {item.segment for item in measured.since}.difference(names_of(incident.segments))
    if goodput is None and (part := _of_segments(measured, others)) is not None:
        told = f"other segments have become at least {part:.0%} slower as well (by formula)"
        yield _Slowdown(part, told)


def _of_segments(measured: Measurement, segments: set[str]) -> float | None:
    sides = [
        [item for item in side if item.segment in segments] for side in (measured.before, measured.since)
    ]
    return slower_at_least(*sides)


def slower_at_least(before: Sequence[TimedRequest], since: Sequence[TimedRequest]) -> float | None:
    """Part of the tokens per second lost by formula, less SURELY standard errors; None where nothing tells.

    Like is compared with like: segments at one K, in their common mix (`decompose`). Requests whose K varied
    have none, and say nothing here: what they accept moves with K.
    Assumptions: independent requests; a step takes as long as before.
    """
    before, since = ([item for item in side if not item.by_first] for side in (before, since))
    move, drafted = decompose(_rates(before), _rates(since)), drafted_per_step(since)
    if move is None or drafted is None:
        return None
    fall = max(-move.within - SURELY * move.within_error, 0.0)
    return formula_slowdown(move.after + fall, move.after, drafted)


def _rates(requests: Sequence[TimedRequest]) -> dict[tuple[str, int | None], Rate]:
    cells: dict[tuple[str, int | None], list[tuple[int, int]]] = defaultdict(list)
    for item in requests:
        cells[item.segment, item.num_speculative_tokens].append((item.drafted, item.accepted))
    rates = {cell: rate_of(counts) for cell, counts in cells.items() if len(counts) >= LEAST_REQUESTS}
    return {cell: rate for cell, rate in rates.items() if rate is not None}


def drafted_per_step(requests: Sequence[TimedRequest]) -> float | None:
    drafted, steps = sum(item.drafted for item in requests), sum(item.steps for item in requests)
    return drafted / steps if drafted and steps else None
