"""From an alarm to what is said about it: when, which segments, how bad."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

import numpy as np

from driftguard.detection.findings import (
    AlarmWithheld,
    DriftOpened,
    DriftSeenGradual,
    DriftWidened,
    SegmentChange,
)
from driftguard.detection.state.columns import SECONDS_PER_DAY, Columns
from driftguard.detection.state.stream_state import (
    ALONE,
    AT_ONCE,
    CERTAINLY,
    DIRECTIONS,
    NEVER,
    POSSIBLY,
    UNTOLD,
    WAITING,
    OpenIncident,
    StreamState,
    untested,
)
from driftguard.detection.statistics.baseline import Baselines
from driftguard.detection.statistics.bets import Floats
from driftguard.detection.statistics.change_point import INTERVAL_LEVEL, between_levels, locate
from driftguard.detection.statistics.ramp import Moves, fit, steady_clock
from driftguard.detection.statistics.windows import LARGEST_SHORTFALL
from driftguard.detection.steps.evidence import (
    SMALLEST_GAP,
    SMALLEST_WEIGHT,
    bets_on,
    evidence_of_stream,
    halfway_at_least,
    ranked,
    segment_evidence,
    variance_of_rows,
)
from driftguard.detection.steps.expectation import (
    acceptance_over,
    at_baseline,
    effect_of_time,
    safe_baseline,
)
from driftguard.records.documents.acceptance import AdjustedChange, Gradual, Reason

FIRST_LOOK = 32  # observations after an alarm, at least, until it is asked again whether it came gradually
LARGEST_PART = 0.75  # of a history that is since the change point, while it is asked
SHORTEST_SECONDS = 1.0  # of a gradual change, for its rate


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

    What is told is what was tested: the mean per request against what was expected of such requests. Where
    lengths shift, the rates as they are counted may move the other way, and are told beside it.
    Segments whose mean since the change point did not move as the alarm says are left out. Where none did
    it is withheld (see `AlarmWithheld`).
    """
    evidence = segment_evidence(state, direction)
    stream_evidence = evidence_of_stream(state, direction)
    evidence_since = state.evidence_since[direction]
    since = np.maximum(evidence_since, state.ready_ordinal)[rows.stratum]
    counted = rows[np.flatnonzero(state.ready[rows.stratum] & (rows.ordinal > since))]
    alarm = _Alarm(state, base, direction == 1, evidence, counted, threshold)
    within_history = set(counted.segment.tolist())
    named = [code for code in ranked(evidence, threshold) if code in within_history]
    pool = named if named and evidence[named[0]] >= stream_evidence else range(len(state.names))
    change_point, change_point_ms, interval = _when(alarm, list(pool))
    after = counted[np.flatnonzero(counted.ordinal >= change_point)]
    present = sorted(set(after.segment.tolist()), key=lambda code: (-evidence[code], code))
    moved = [code for code in present if _moved_so(alarm, after, code)]
    named = [code for code in named if code in moved]
    changed = named or [code for code in _beyond_baseline(alarm, after) if code in moved] or moved[:1]
    if not changed:
        return AlarmWithheld(DIRECTIONS[direction], state.ordinal, rows.ended_at(-1), total, threshold)
    gradual = _gradual(
        state, base, _of_segments(counted, changed), rows, evidence_since, interval[0], rise=alarm.rise
    )
    incident = OpenIncident(
        opened_ordinal=state.ordinal,
        change_point=change_point,
        change_point_ms=change_point_ms,
        evidence_since=evidence_since,
        earliest=interval[0],
        told_gradual=_kind_of(gradual),
        next_look=_next_look(state, rows, change_point),
        segments=np.array(changed, dtype=np.uint8),
        evidence=evidence[changed],
        alarm_ordinal=np.full(len(changed), state.ordinal),
        began=np.full(len(changed), change_point),
        **_tests(alarm, after, changed, common=not named),
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
        gradual=gradual,
        adjusted=_adjusted(alarm, after, changed),
        before=at_baseline(state, after),
        after=acceptance_over(state, after),
        evidence=total,
        false_alarm_every=threshold,
        requests_to_alarm=len(after),
        unit="windows" if state.of_windows[np.isin(state.segment_of_stratum, changed)].any() else "requests",
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
    as columns): those that changed join it, and have to come back as well before it is over."""
    others = rows[np.flatnonzero(~np.isin(rows.segment, incident.segments))]
    alarm = open_incident(state, base, others, direction, total, threshold)
    if isinstance(alarm, AlarmWithheld):
        return alarm
    more, found = alarm
    return more, DriftWidened(
        direction=found.direction,
        ordinal=found.ordinal,
        ended_at=found.ended_at,
        change_point=found.change_point,
        change_point_at=found.change_point_at,
        segments=found.segments,
        requests_to_alarm=found.requests_to_alarm,
        unit=found.unit,
    )


def _when(alarm: _Alarm, pool: list[int]) -> tuple[int, int, tuple[int, int]]:
    """(ordinal, milliseconds, interval of ordinals) of the change point.

    The interval begins right after the last request of the pool that it leaves out: the change may
    have happened between the two. Where it leaves none out it begins with the evidence: the history may be
    shorter.
    """
    rows = alarm.rows[np.flatnonzero(np.isin(alarm.rows.segment, pool))]
    at = locate(bets_on(alarm.state, alarm.base, rows, rise=alarm.rise))
    point = at.point
    if alarm.state.of_windows[rows.stratum].all():
        point = between_levels(at, (1.0 if alarm.rise else -1.0) * (rows.x - rows.expected))
    if at.first:
        first = int(rows.ordinal[at.first - 1]) + 1
    else:
        watched = int(alarm.state.ready_ordinal[np.unique(rows.stratum)].min())
        first = max(watched, alarm.state.evidence_since[int(alarm.rise)]) + 1
    return int(rows.ordinal[point]), int(rows.ended_ms[point]), (first, int(rows.ordinal[at.last]))


def _beyond_baseline(alarm: _Alarm, after: Columns) -> list[int]:
    """Segments that may be part of a fall (or rise) of the whole stream; at least the strongest."""
    present = sorted(set(after.segment.tolist()), key=lambda code: (-alarm.evidence[code], code))
    after = after[np.flatnonzero(after.fresh > 0.0)]
    sign = 1.0 if alarm.rise else -1.0
    distance = sign * (after.x - safe_baseline(after, rise=alarm.rise))
    beyond = [
        code
        for code in present
        if distance[after.segment == code].sum() > 0.0
        and alarm.evidence[code] ** 2 >= alarm.evidence[present[0]]
    ]
    return beyond or present[:1]


def _moved_so(alarm: _Alarm, after: Columns, code: int) -> bool:
    """Does the segment's mean since the change point lie on the alarm's side of what was expected?"""
    return _distance(alarm, after[np.flatnonzero(after.segment == code)]) >= SMALLEST_GAP


def _distance(alarm: _Alarm, rows: Columns) -> float:
    """Between before and after, above 0 on the alarm's side: that of a change which shows in request t as
    fresh_t x distance, by least squares; 0 where no row tells."""
    sign = 1.0 if alarm.rise else -1.0
    moved, weight = sign * rows.fresh * (rows.x - rows.expected), rows.fresh**2
    return float(moved.sum() / max(weight.sum(), SMALLEST_WEIGHT))


def _adjusted(alarm: _Alarm, after: Columns, changed: list[int]) -> AdjustedChange:
    """Of these segments together, each in the part that it has of their requests."""
    own = after[np.flatnonzero(np.isin(after.segment, changed) & (after.fresh > 0.0))]
    distances = {code: _distance(alarm, own[np.flatnonzero(own.segment == code)]) for code in changed}
    gap = float(np.mean([distances[code] for code in own.segment.tolist()]))
    now, stratum = float(own.x.mean()), own.stratum
    before = min(max(now - gap if alarm.rise else now + gap, 0.0), 1.0)
    counted_before, counted_after = at_baseline(alarm.state, own).rate, acceptance_over(alarm.state, own).rate
    of_time = float(effect_of_time(alarm.state, own).mean())
    at_mean_length = float(alarm.base.mean[stratum].mean()) + of_time
    of_length = before - at_mean_length
    of_weights = (counted_after - now) - (counted_before - at_mean_length)
    longer = of_length * float(alarm.base.slope[stratum].mean()) > 0.0
    reasons: list[tuple[float, Reason]] = [
        (abs(of_length), "answers are longer" if longer else "answers are shorter"),
        (abs(of_weights), "requests with many draft tokens count more"),
    ]
    if not alarm.base.slope[stratum].any():
        del reasons[0]
    largest = max(size for size, _ in reasons)
    because = tuple(reason for size, reason in sorted(reasons, reverse=True) if 2.0 * size >= largest)
    return AdjustedChange(before, now, counted_before, counted_after, because)


def looked_again(
    state: StreamState,
    incident: OpenIncident,
    base: Baselines,
    rows: Columns,
    direction: int,
    history: int,
) -> tuple[OpenIncident, list[DriftSeenGradual]]:
    """Asks again whether the change of the open `incident` of this direction came gradually, from `rows` (the
    history as columns, of at most `history` observations): of the segments of its alarm that have not come
    back.

    It is asked whenever the observations since the change point have doubled, and last when they are
    LARGEST_PART of the history, whose rest says where it began. What is over is not asked again. What was
    told as gradual stays so while that is likelier than any change at once.
    """
    going_on = (incident.outcome[incident.test] == WAITING) & (
        incident.alarm_ordinal == incident.opened_ordinal
    )
    since = np.maximum(incident.evidence_since, state.ready_ordinal)
    comparable = state.ready & (state.ready_ordinal <= incident.opened_ordinal)
    own = _of_segments(rows, incident.segments[going_on].tolist())
    own = own[np.flatnonzero(comparable[own.stratum] & (own.ordinal > since[own.stratum]))]
    if rows.ordinal[0] > incident.change_point or not len(own):
        return replace(incident, next_look=NEVER), []
    found = _gradual(
        state,
        base,
        own,
        rows,
        incident.evidence_since,
        incident.earliest,
        rise=direction == 1,
        told=incident.told_gradual == CERTAINLY,
    )
    since_then = _since(rows, incident.change_point)
    more = min(since_then, int(LARGEST_PART * history) - since_then)
    is_last = more <= 0 or (found is not None and found.over)
    next_look = NEVER if is_last else int(state.drafted_requests.sum()) + more
    kind = _kind_of(found)
    told = kind == CERTAINLY or kind < incident.told_gradual
    incident = replace(incident, next_look=next_look, told_gradual=kind if told else incident.told_gradual)
    finding = DriftSeenGradual(DIRECTIONS[direction], state.ordinal, rows.ended_at(-1), found)
    return incident, [finding] if told else []


def _next_look(state: StreamState, rows: Columns, change_point: int) -> int:
    return int(state.drafted_requests.sum()) + max(_since(rows, change_point), FIRST_LOOK)


def _since(rows: Columns, change_point: int) -> int:
    return int((rows.ordinal >= change_point).sum())


def _of_segments(rows: Columns, segments: list[int]) -> Columns:
    """Those of them that tell something."""
    return rows[np.flatnonzero(np.isin(rows.segment, segments) & (rows.fresh > 0.0))]


def _kind_of(gradual: Gradual | None) -> int:
    if gradual is None:
        return AT_ONCE
    return CERTAINLY if gradual.certain else POSSIBLY


def _gradual(
    state: StreamState,
    base: Baselines,
    rows: Columns,
    history: Columns,
    since: int,
    earliest: int,
    *,
    rise: bool,
    told: bool = False,
) -> Gradual | None:
    """The change of these watched rows, all after the ordinal `since`, as a gradual one, where that may have
    begun before the ordinal `earliest`. `told`: it was told as certain before.

    Where the history no longer holds the end of the reference period, the onset is looked for before it too.
    """
    strata, stratum = np.unique(rows.stratum, return_inverse=True)
    variance = variance_of_rows(state, base, rows)
    reach = LARGEST_SHORTFALL * np.sqrt(variance)
    seconds = steady_clock(rows.ended_ms / 1000.0)
    moves = Moves(
        seconds=seconds,
        residual=np.clip(rows.x - rows.expected, -reach, reach),
        shown=rows.fresh,
        variance=variance * state.inflation[rows.stratum],
        stratum=stratum,
        level_error=base.mean_error[strata],
        of_windows=state.of_windows[rows.stratum],
    )
    watched_since = max(int(state.ready_ordinal[strata].min()), since)
    forgotten = int(history.ordinal[0]) > watched_since + 1
    oldest = float(state.reference_since[strata].min()) if forgotten else float(seconds[0])
    found = fit(moves, oldest, rise=rise)
    begun = seconds[min(int(np.searchsorted(rows.ordinal, earliest)), len(rows) - 1)]
    if found is None:
        return None
    certain = found.certain or (told and found.gain > 0.0)
    if found.first >= begun and not certain:
        return None
    onset = int(rows.ordinal[min(int(np.searchsorted(seconds, found.onset)), len(rows) - 1)])
    at, first, last, end = (
        datetime.fromtimestamp(when, UTC) for when in (found.onset, found.first, found.last, found.end)
    )
    per_day = found.moved / max(found.end - found.onset, SHORTEST_SECONDS) * SECONDS_PER_DAY
    return Gradual(onset, at, (first, last), end, found.moved, per_day, certain, found.over)


def _tests(alarm: _Alarm, after: Columns, changed: list[int], *, common: bool) -> dict[str, Any]:
    """The columns of an incident for its recovery tests, none of which has begun: one for each of the changed
    segments, and one of all in `common`."""
    own = [after.segment == code for code in changed]
    shared = common and len(changed) > 1
    tested = [*own, np.logical_or.reduce(own)] if shared else own
    told, halfway = zip(*(_told(alarm, after[np.flatnonzero(rows)]) for rows in tested), strict=True)
    return {
        "test": np.arange(len(changed)),
        "common": np.full(len(changed), len(changed) if shared else ALONE),
        "halfway": np.array(halfway),
        "told": np.stack(told),
        **untested(len(tested), int(alarm.state.drafted_requests.sum())),
    }


def _told(alarm: _Alarm, rows: Columns) -> tuple[Floats, float]:
    """What these rows tell of the distance, as UNTOLD, and half of it, as far as is sure."""
    of_windows = alarm.state.of_windows[rows.stratum].all()  # of many requests each: alike, but not by chance
    before = np.zeros_like(UNTOLD) if of_windows else UNTOLD
    told, halfway = halfway_at_least(alarm.state, alarm.base, rows, before, rise=alarm.rise)
    return told[-1], float(halfway[-1])


def _change(alarm: _Alarm, after: Columns, code: int) -> SegmentChange:
    own = after.segment == code
    return SegmentChange(
        alarm.state.names[code],
        at_baseline(alarm.state, after[np.flatnonzero(own)]),
        acceptance_over(alarm.state, after[np.flatnonzero(own)]),
        float(alarm.evidence[code]),
        _adjusted(alarm, after, [code]),
    )
