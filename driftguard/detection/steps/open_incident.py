"""From an alarm to what is said about it: when, which segments, how bad."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from driftguard.detection.findings import AlarmWithheld, DriftOpened, DriftWidened, SegmentChange
from driftguard.detection.state.columns import Columns
from driftguard.detection.state.stream_state import DIRECTIONS, Ints, OpenIncident, StreamState, untested
from driftguard.detection.statistics.baseline import Baselines
from driftguard.detection.statistics.bets import Floats
from driftguard.detection.statistics.change_point import INTERVAL_LEVEL, between_levels, locate
from driftguard.detection.steps.evidence import bets_on, evidence_of_stream, ranked, segment_evidence
from driftguard.detection.steps.expectation import acceptance_over, at_baseline, safe_baseline

SMALLEST_GAP = 0.002  # between before and after, so that a recovery test always has a direction
SMALLEST_WEIGHT = 1e-9


@dataclass(frozen=True, slots=True)
class _Alarm:
    """What the questions below share: the watched requests that could be the cause."""

    state: StreamState
    base: Baselines
    rise: bool
    evidence: Floats  # [S] M of each segment
    rows: Columns
    threshold: float


def open_incident(
    state: StreamState, base: Baselines, rows: Columns, direction: int, total: float, threshold: float
) -> tuple[OpenIncident, DriftOpened] | AlarmWithheld:
    """At the request that raised the alarm, which is the last of `rows` (the history as columns).

    The change point is looked for among the requests of the named segments when one of them carries
    more evidence than the stream, else among all. Where no segment reaches M_(k) >= A/k the stream
    as a whole raised the alarm: the segments then listed are those whose mean since the change point
    lies beyond their safe baseline and whose evidence is, in logarithms, at least half the strongest's:
    a description and not a test.

    Withheld where acceptance did not move the way that the alarm says: bets are made against what requests of
    their length should accept, and lengths that shift can turn that against the plain rates before and after.
    Of several segments those that did not are left out.
    """
    evidence = segment_evidence(state, direction)
    stream_evidence = evidence_of_stream(state, direction)
    since = np.maximum(state.evidence_since[direction], state.ready_ordinal)[rows.stratum]
    counted = rows[np.flatnonzero(state.ready[rows.stratum] & (rows.ordinal > since))]
    alarm = _Alarm(state, base, direction == 1, evidence, counted, threshold)
    within_history = set(counted.segment.tolist())
    named = [code for code in ranked(evidence, threshold) if code in within_history]
    pool = named if named and evidence[named[0]] >= stream_evidence else range(len(state.names))
    change_point, change_point_ms, interval = _when(alarm, list(pool))
    after = counted[np.flatnonzero(counted.ordinal >= change_point)]
    present = set(after.segment.tolist())
    named = [code for code in named if code in present]
    changed = [code for code in named or _beyond_baseline(alarm, after) if _moved_so(alarm, after, code)]
    if not changed:
        return AlarmWithheld(DIRECTIONS[direction], state.ordinal, rows.ended_at(-1), total, threshold)
    incident = OpenIncident(
        state.ordinal,
        change_point,
        change_point_ms,
        np.array(changed, dtype=np.uint8),
        evidence[changed],
        np.full(len(changed), state.ordinal),
        *_tests(alarm, after, changed, common=not named),
    )
    return incident, DriftOpened(
        direction=DIRECTIONS[direction],
        scope="segments" if named else "stream",
        ordinal=state.ordinal,
        ended_at=rows.ended_at(-1),
        change_point=change_point,
        change_point_at=change_point_ms / 1000.0,
        interval=interval,
        interval_level=INTERVAL_LEVEL,
        segments=tuple(_change(alarm, after, code) for code in changed),
        before=at_baseline(state, after),
        after=acceptance_over(state, after),
        evidence=total,
        false_alarm_every=threshold,
        requests_to_alarm=len(after),
    )


def widen_incident(
    incident: OpenIncident,
    state: StreamState,
    base: Baselines,
    rows: Columns,
    direction: int,
    total: float,
    threshold: float,
) -> tuple[OpenIncident, DriftWidened] | AlarmWithheld:
    """At an alarm of segments that are not in the open `incident` of this direction, from `rows` (the history
    as columns): the incident with those that changed, which have to come back as well before it is over."""
    others = rows[np.flatnonzero(~np.isin(rows.segment, incident.segments))]
    alarm = open_incident(state, base, others, direction, total, threshold)
    if isinstance(alarm, AlarmWithheld):
        return alarm
    more, found = alarm
    wider = replace(
        incident,
        segments=np.concatenate([incident.segments, more.segments]),
        evidence=np.concatenate([incident.evidence, more.evidence]),
        alarm_ordinal=np.concatenate([incident.alarm_ordinal, more.alarm_ordinal]),
        halfway=np.concatenate([incident.halfway, more.halfway]),
        test=np.concatenate([incident.test, more.test + len(incident.outcome)]),
        wealth=np.concatenate([incident.wealth, more.wealth]),
        seen=np.concatenate([incident.seen, more.seen]),
        last_seen=np.concatenate([incident.last_seen, more.last_seen]),
        outcome=np.concatenate([incident.outcome, more.outcome]),
    )
    return wider, DriftWidened(
        direction=found.direction,
        ordinal=found.ordinal,
        ended_at=found.ended_at,
        change_point=found.change_point,
        change_point_at=found.change_point_at,
        segments=found.segments,
        requests_to_alarm=found.requests_to_alarm,
    )


def _when(alarm: _Alarm, pool: list[int]) -> tuple[int, int, tuple[int, int]]:
    """(ordinal, milliseconds, interval of ordinals) of the change point.

    The interval begins right after the last request of the pool that it leaves out: the change may
    have happened between the two.
    """
    rows = alarm.rows[np.flatnonzero(np.isin(alarm.rows.segment, pool))]
    at = locate(bets_on(alarm.state, alarm.base, rows, rise=alarm.rise))
    point = at.point
    if alarm.state.of_windows[rows.stratum].all():
        point = between_levels(at, (1.0 if alarm.rise else -1.0) * (rows.x - rows.expected))
    first = rows.ordinal[at.first - 1] + 1 if at.first else rows.ordinal[0]
    return int(rows.ordinal[point]), int(rows.ended_ms[point]), (int(first), int(rows.ordinal[at.last]))


def _beyond_baseline(alarm: _Alarm, after: Columns) -> list[int]:
    """Segments that may be part of a fall (or rise) of the whole stream; at least the strongest."""
    present = sorted(set(after.segment.tolist()), key=lambda code: (-alarm.evidence[code], code))
    after = after[np.flatnonzero(after.fresh > 0.0)]
    sign = 1.0 if alarm.rise else -1.0
    distance = sign * (after.x - safe_baseline(after, rise=alarm.rise))
    beyond = [
        code
        for code in present
        if distance[after.segment == code].mean() > 0.0
        and alarm.evidence[code] ** 2 >= alarm.evidence[present[0]]
    ]
    return beyond or present[:1]


def _moved_so(alarm: _Alarm, after: Columns, code: int) -> bool:
    """Is the segment's plain acceptance since the change point on the alarm's side of its baseline?"""
    change = _change(alarm, after, code)
    before, now = change.before.rate, change.after.rate
    return now > before if alarm.rise else now < before


def _tests(
    alarm: _Alarm, after: Columns, changed: list[int], *, common: bool
) -> tuple[Floats, Ints, Floats, Ints, Ints, Ints]:
    """(halfway, test) of the changed segments, then the empty recovery tests (see OpenIncident).

    The distance between before and after is that of a change which shows in request t as
    fresh_t x distance, by least squares.
    """
    sign = 1.0 if alarm.rise else -1.0
    own = [after.segment == code for code in changed]
    if common:
        own = [np.logical_or.reduce(own)] * len(changed)
    moved = sign * after.fresh * (after.x - after.expected)
    weight = after.fresh**2
    gaps = [float(moved[rows].sum() / max(weight[rows].sum(), SMALLEST_WEIGHT)) for rows in own]
    halfway = np.clip(gaps, SMALLEST_GAP, 1.0) / 2.0
    test = np.zeros(len(changed), dtype=np.int64) if common else np.arange(len(changed))
    now = int(alarm.state.drafted_requests.sum())
    return halfway, test, *untested(1 if common else len(changed), now)


def _change(alarm: _Alarm, after: Columns, code: int) -> SegmentChange:
    own = after.segment == code
    return SegmentChange(
        alarm.state.names[code],
        at_baseline(alarm.state, after[np.flatnonzero(own)]),
        acceptance_over(alarm.state, after[np.flatnonzero(own)]),
        float(alarm.evidence[code]),
    )
