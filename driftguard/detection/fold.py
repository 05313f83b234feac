"""The detector: folds observations of one stream into its state, and says what it found.

Per stratum: a reference period (`reference_period.py`), then evidence of a fall and of a rise
(`evidence.py`). An alarm opens an incident of its direction (`open_incident.py`) and stops that direction's
evidence of its segments. It is over in each of them that has come back (`recovery.py`), and the evidence
starts anew against the same baseline, whether or not the others are back. The two directions are
independent: an open rise never hides a fall.

Each direction may have one open incident. Segments that change while one is open join it. A rise that lasts
becomes the norm (`new_normal.py`), so that a fall from it is one.

The result does not depend on how the observations are cut into batches, to the last bit: a batch is
worked through in steps that end at every event, and every sum runs in the order of the observations.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np

from driftguard.detection.config import DetectorConfig
from driftguard.detection.findings import AlarmWithheld, Direction, Finding
from driftguard.detection.observations import ObservationBatch
from driftguard.detection.state.columns import (
    Columns,
    columns_of,
    counted,
    history_rows,
    sessions_before,
    windows_in,
)
from driftguard.detection.state.stream_state import (
    DIRECTIONS,
    LASTED,
    RECOVERED,
    WAITING,
    Floats,
    OpenIncident,
    StreamState,
    changed,
    with_strata,
    with_varying_k,
)
from driftguard.detection.statistics.baseline import Baselines, baselines
from driftguard.detection.statistics.sessions import NO_SESSION, OpenSessions
from driftguard.detection.statistics.turns import without_newest
from driftguard.detection.statistics.windows import after_gap
from driftguard.detection.steps.confirmation import is_confirmed, looked_at_later
from driftguard.detection.steps.cycles import (
    cycles_begin,
    rows_until_cycle_counts,
    tally,
    with_effects,
    with_onset,
)
from driftguard.detection.steps.dependence import (
    after_incident,
    after_withheld,
    measured,
    measured_after,
)
from driftguard.detection.steps.evidence import keep_evidence, watch, without_evidence
from driftguard.detection.steps.expectation import predicted
from driftguard.detection.steps.first_part import with_rest_judged
from driftguard.detection.steps.new_normal import became_normal, learned_anew, parted
from driftguard.detection.steps.open_incident import looked_again, open_incident, widen_incident
from driftguard.detection.steps.recovery import (
    back_together,
    closed,
    keep_tests,
    requests_until_silent,
    run_tests,
)
from driftguard.detection.steps.reference_period import (
    check_reference,
    requests_until_check,
    with_joining,
    with_reference,
    with_turns,
)

STEP_OBSERVATIONS = 2048


def fold(
    config: DetectorConfig, state: StreamState, batch: ObservationBatch
) -> tuple[StreamState, list[Finding]]:
    """The state after the batch, and the findings in order. `state` itself is left as it was.

    Observations with drafted = 0, at all positions or at the first where they are judged by that, are counted
    and hold no evidence. Raises ValueError when the batch does not begin after the last observation folded:
    folding a record twice would be wrong.
    """
    if len(batch) == 0:
        return state, []
    if batch.ordinal[0] <= state.ordinal:
        raise ValueError(
            f"observation {batch.ordinal[0]} does not follow {state.ordinal}, the last one folded"
        )
    gap, last_end = after_gap(windows_in(batch), batch.started_at, batch.ended_at, state.last_window_ended_at)
    batch, k_varies, k_newest, k_changes = with_varying_k(state, batch)
    evident = (batch.judged_drafted > 0) & ~gap
    state, strata = with_strata(state, batch, evident, k_varies)
    before, rows = state, columns_of(state, batch, evident, strata)
    findings: list[Finding] = []
    done = 0
    while done < len(rows):
        state, found, done = _step(config, before, state, batch, rows, done)
        findings += found
    of_batch = {
        "k_newest": k_newest,
        "k_changes": k_changes,
        "last_window_ended_at": last_end,
        "windows_after_gap": state.windows_after_gap + int(gap.sum()),
    }
    return changed(counted(before, state, batch), of_batch), findings


def _step(
    config: DetectorConfig,
    before: StreamState,
    state: StreamState,
    batch: ObservationBatch,
    rows: Columns,
    start: int,
) -> tuple[StreamState, list[Finding], int]:
    """Folds rows from `start` up to the next event; returns the place after it."""
    first = rows[start : start + 1]
    state, findings = cycles_begin(state, first, before.requests + int(first.place[0]), config.ignore)
    base = baselines(state.reference, state.inflation, state.measured_at, state.of_windows)
    part = with_effects(state, rows[start : _step_end(config, state, rows, start)])
    seen = int(state.drafted_requests.sum())
    earlier, sessions = _sessions(state, part, seen)
    part = predicted(state, base, config.ignore, part, earlier)
    threshold = config.threshold(state.requests_per_day)
    run = watch(state, base, part)
    tests = [
        run_tests(state, incident, base, part, fall=direction == 0) if incident else {}
        for direction, incident in enumerate(state.incidents)
    ]
    alarms = [
        run.first_alarm(direction, threshold, looked_at - seen - 1)
        for direction, looked_at in enumerate(state.next_alarm)
    ]
    events = alarms + [test.first_event() for runs in tests for test in runs.values()]
    stop = min((place for place in events if place is not None), default=len(part) - 1) + 1

    if stop < len(part):
        _, sessions = _sessions(state, part[:stop], seen)
    state = keep_evidence(state, run, stop)
    state = _with_rows(config, state, base, part[:stop], earlier[:stop], sessions)
    for direction, incident in enumerate(state.incidents):
        if incident is not None:
            incident = keep_tests(incident, tests[direction], stop, seen, config.history)
            state, over = _after_tests(state, base, incident, direction)
            findings += over
            incident = state.incidents[direction]
            if over:
                continue  # the evidence of this direction has begun anew
        if alarms[direction] == stop - 1:
            total = float(run.totals[direction][np.searchsorted(run.places, stop - 1)])
            state, found = _alarmed(config, state, base, incident, direction, total, threshold)
            findings += found
        state, found = _with_look(config, state, base, direction)
        findings += found
    state, found = check_reference(config, before, state, batch, part[stop - 1 : stop])
    state, ended = _with_measurement(config, state)
    return state, findings + found + ended, start + stop


def _with_measurement(config: DetectorConfig, state: StreamState) -> tuple[StreamState, list[Finding]]:
    """The state that has measured the dependence, where it is time to. While no stratum has a baseline there
    is nothing to measure: no step ends for that, and the times that have passed by then are left out."""
    if not state.ready.any():
        return state, []
    seen, due = int(state.drafted_requests.sum()), state.next_measured
    while due < seen:
        due = measured_after(config, due)
    if due == seen:
        return _with_lasting_rise(measured(config, state))
    return (state if due == state.next_measured else changed(state, {"next_measured": due})), []


def _with_lasting_rise(state: StreamState) -> tuple[StreamState, list[Finding]]:
    """The state in which a rise that lasts has become the norm (`new_normal.py`)."""
    rise = state.incidents[1]
    lasting, left = (None, None) if rise is None else parted(state, rise)
    if lasting is None:
        return state, []
    finding = became_normal(state, history_rows(state), lasting, 1, left)
    return learned_anew(_without(state, 1, lasting, left, finding.ended_at), lasting, LASTED), [finding]


def _with_look(
    config: DetectorConfig, state: StreamState, base: Baselines, direction: int
) -> tuple[StreamState, list[Finding]]:
    """The state that has looked again whether the change of its open incident came gradually, where it is
    time to."""
    incident = state.incidents[direction]
    if incident is None or int(state.drafted_requests.sum()) < incident.next_look:
        return state, []
    rows = with_rest_judged(state, base, config.ignore, history_rows(state))
    incident, found = looked_again(state, incident, base, rows, direction, config.history)
    return _with_incident(state, direction, incident), [*found]


def _step_end(config: DetectorConfig, state: StreamState, rows: Columns, start: int) -> int:
    """Where the step must end at the latest: at a check of a reference period or of a silent segment, when
    the dependence is measured, when an open incident is looked at again, and at the end of a day or a week
    that counts."""
    end = min(start + min(STEP_OBSERVATIONS, state.until_measured), len(rows))
    seen = int(state.drafted_requests.sum())
    for incident in state.incidents:
        if incident is not None:
            end = min(end, start + requests_until_silent(incident, seen, config.history))
            end = min(end, start + max(incident.next_look - seen, 1))
    end = start + requests_until_check(state, rows[start:end])
    return start + rows_until_cycle_counts(state, rows[start:end])


def _with_rows(
    config: DetectorConfig,
    state: StreamState,
    base: Baselines,
    rows: Columns,
    earlier: Floats,
    sessions: OpenSessions,
) -> StreamState:
    """The state that has put these rows in its history, days, weeks and reference periods. `earlier` and
    `sessions`: see `_sessions`."""
    state = with_reference(state, rows, earlier)
    return changed(
        state,
        {
            "joining": with_joining(state, rows, earlier),
            "ordinal": int(rows.ordinal[-1]),
            "drafted_requests": state.drafted_requests
            + np.bincount(rows.stratum, minlength=len(state.drafted_requests)),
            "sessions": sessions,
            "in_session": state.in_session + int((rows.session != NO_SESSION).sum()),
            "profiles": tally(state, base, rows),
            "turns": with_turns(state, rows, earlier),
            "history": state.history.followed_by(rows, config.history),
        },
    )


def _sessions(state: StreamState, rows: Columns, seen: int) -> tuple[Floats, OpenSessions]:
    """Each row's session as it was before it, and the table after all; `seen` requests came before."""
    return sessions_before(state.sessions, rows, seen + 1)


def _alarmed(
    config: DetectorConfig,
    state: StreamState,
    base: Baselines,
    incident: OpenIncident | None,
    direction: int,
    total: float,
    threshold: float,
) -> tuple[StreamState, list[Finding]]:
    """Opens an incident, or widens the one that is open, unless nothing moved that way, or the stream is too
    young to tell."""
    rows = with_rest_judged(state, base, config.ignore, history_rows(state))
    if not is_confirmed(config.ignore, state, base, rows, direction, threshold):
        return looked_at_later(state, direction), []
    alarm = (
        open_incident(state, base, rows, direction, total, threshold)
        if incident is None
        else widen_incident(incident, state, base, rows, direction, total, threshold)
    )
    if isinstance(alarm, AlarmWithheld):
        return after_withheld(without_evidence(state, direction)), [alarm]
    more, finding = alarm
    opened = more if incident is None else incident.joined_by(more)
    return with_onset(_opened(state, direction, opened), more, direction), [finding]


def _after_tests(
    state: StreamState, base: Baselines, incident: OpenIncident, direction: int
) -> tuple[StreamState, list[Finding]]:
    """Ends the incident when each of its segments has come back or is silent. While one has not, those that
    have come back leave it: it hides no other change of them."""
    recovered = (incident.outcome == RECOVERED).any()
    if not recovered and (incident.outcome[incident.test] == WAITING).any():
        return _with_incident(state, direction, incident), []
    rows = history_rows(state)
    if recovered:
        incident = back_together(state, base, rows, incident, direction)
    outcome = incident.outcome[incident.test]
    over, left, back = incident, None, outcome == RECOVERED
    if (outcome == WAITING).any():
        if not back.any():
            return _with_incident(state, direction, incident), []
        over, left = incident.of_segments(back), incident.of_segments(~back)
    finding = closed(state, base, rows, over, direction, left)
    return _without(state, direction, over, left, finding.ended_at), [finding]


def _with_incident(state: StreamState, direction: int, incident: OpenIncident | None) -> StreamState:
    down, up = state.incidents
    return replace(state, incidents=(incident, up) if direction == 0 else (down, incident))


def _opened(state: StreamState, direction: int, incident: OpenIncident) -> StreamState:
    state = replace(_without_newest_turns(state), joining=np.zeros_like(state.joining))
    return without_evidence(_with_incident(state, direction, incident), direction)


def _without_newest_turns(state: StreamState) -> StreamState:
    return replace(state, turns=without_newest(state.turns)) if state.in_session else state


def _without(
    state: StreamState, direction: int, over: OpenIncident, left: OpenIncident | None, at: float
) -> StreamState:
    """The state with what is left of an incident of which this is over."""
    return _with_incident(_ended(_with_incident(state, direction, over), direction, at), direction, left)


def _ended(state: StreamState, direction: int, at: float) -> StreamState:
    incident = state.incidents[direction]
    if incident is not None:
        state = after_incident(state, incident)
    state = _without_newest_turns(state)
    return replace(without_evidence(_with_incident(state, direction, None), direction), steady_since=at)


def end_incident(state: StreamState, direction: Direction) -> StreamState:
    """The state without its open incident, evidence started anew: when a person resolved it by hand."""
    return _ended(state, DIRECTIONS.index(direction), state.last_ended_at)


def leave_incident(state: StreamState, direction: Direction, segments: Collection[str]) -> StreamState:
    """The state whose open incident of this direction, if any, holds these segments no longer: they are
    watched again, evidence started anew."""
    place = DIRECTIONS.index(direction)
    incident = state.incidents[place]
    if incident is None:
        return state
    leaving = np.isin(incident.names(state), [*segments])
    if not leaving.any():
        return state
    left = None if leaving.all() else incident.of_segments(~leaving)
    return _without(state, place, incident.of_segments(leaving), left, state.last_ended_at)
