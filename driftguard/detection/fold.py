"""The detector: folds observations of one stream into its state, and says what it found.

Per stratum: a reference period (`baseline.py`), then evidence of a fall and of a rise (`evidence.py`).
An alarm opens an incident of its direction (`opening.py`) and stops that direction's evidence; the
incident ends when its segments have come back (`recovery.py`), and the evidence starts anew against
the same baseline. The two directions are independent: an open rise never hides a fall.

Each direction may have one open incident. Segments that change while one is open are found after it
has ended.

The result does not depend on how the observations are cut into batches, to the last bit: a batch is
worked through in steps that end at every event, and every sum runs in the order of the observations.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.at_baseline import baseline_of
from driftguard.detection.baseline import (
    Baselines,
    add_terms,
    baselines,
    needed_requests,
    terms,
)
from driftguard.detection.closing import closed
from driftguard.detection.columns import Columns, columns_of, history_rows
from driftguard.detection.config import DetectorConfig
from driftguard.detection.evidence import keep_evidence, watch, without_evidence
from driftguard.detection.findings import BaselineReady, Direction, Finding
from driftguard.detection.observations import ObservationBatch
from driftguard.detection.opening import open_incident
from driftguard.detection.predictive import predicted
from driftguard.detection.recovery import WAITING, keep_tests, requests_until_silent, run_tests
from driftguard.detection.sessions import NO_SESSION, sums_before
from driftguard.detection.state import DIRECTIONS, OpenIncident, StreamState, with_strata
from driftguard.detection.strata import unpack
from driftguard.detection.windows import WINDOW_REFERENCE, after_gap, deviation, learn, window_margin

STEP_OBSERVATIONS = 2048
SECONDS_PER_DAY = 86_400.0


def fold(
    config: DetectorConfig, state: StreamState, batch: ObservationBatch
) -> tuple[StreamState, list[Finding]]:
    """The state after the batch, and the findings in order. `state` itself is left as it was.

    Observations with drafted = 0 are counted and hold no evidence. Raises ValueError when the batch
    does not begin after the last observation folded: folding a record twice would be wrong.
    """
    if len(batch) == 0:
        return state, []
    if batch.ordinal[0] <= state.ordinal:
        raise ValueError(
            f"observation {batch.ordinal[0]} does not follow {state.ordinal}, the last one folded"
        )
    gap, last_end = after_gap(_windows(batch), batch.started_at, batch.ended_at, state.last_window_ended_at)
    evident = (batch.drafted > 0) & ~gap
    state, strata = with_strata(state, batch, evident)
    before, rows = state, columns_of(state, batch, evident, strata)
    findings: list[Finding] = []
    done = 0
    while done < len(rows):
        state, found, done = _step(config, before, state, batch, rows, done)
        findings += found
    state = _counted(before, state, batch)
    missed = state.windows_after_gap + int(gap.sum())
    return replace(state, last_window_ended_at=last_end, windows_after_gap=missed), findings


def _windows(batch: ObservationBatch) -> NDArray[np.bool_]:
    return np.array([kind == "window" for kind in batch.kind], dtype=np.bool_)


def _step(
    config: DetectorConfig,
    before: StreamState,
    state: StreamState,
    batch: ObservationBatch,
    rows: Columns,
    start: int,
) -> tuple[StreamState, list[Finding], int]:
    """Folds rows from `start` up to the next event; returns the place after it."""
    base = baselines(state.reference)
    part = rows[start : _step_end(config, state, rows, start)]
    earlier, _ = sums_before(state.sessions, part.session, part.x, part.log_length)
    part = predicted(state, base, config.ignore, part, earlier)
    threshold = config.threshold(state.requests_per_day)
    seen = int(state.drafted_requests.sum())
    run = watch(state, base, part)
    tests = [
        run_tests(state, incident, base, part, fall=direction == 0) if incident else {}
        for direction, incident in enumerate(state.incidents)
    ]
    alarms = [run.first_alarm(direction, threshold) for direction in range(2)]
    events = alarms + [test.first_decided() for runs in tests for test in runs.values()]
    stop = min((place for place in events if place is not None), default=len(part) - 1) + 1

    state = _with_rows(config, keep_evidence(state, run, stop), part[:stop])
    findings: list[Finding] = []
    for direction, incident in enumerate(state.incidents):
        if incident is not None:
            incident = keep_tests(incident, tests[direction], stop, seen, config.history)
            state, found = _after_tests(state, base, incident, direction)
            findings += found
        elif alarms[direction] == stop - 1:
            total = float(run.totals[direction][np.searchsorted(run.places, stop - 1)])
            opened, finding = open_incident(state, base, history_rows(state), direction, total, threshold)
            state = without_evidence(_with_incident(state, direction, opened), direction)
            findings.append(finding)
    state, found = _check_reference(config, before, state, batch, part[stop - 1 : stop])
    return state, findings + found, start + stop


def _step_end(config: DetectorConfig, state: StreamState, rows: Columns, start: int) -> int:
    """Where the step must end at the latest: at a check of a reference period, or of a silent segment."""
    end = min(start + STEP_OBSERVATIONS, len(rows))
    seen = int(state.drafted_requests.sum())
    for incident in state.incidents:
        if incident is not None:
            end = min(end, start + requests_until_silent(incident, seen, config.history))
    stratum = rows.stratum[start:end]
    for code in np.unique(stratum[~state.ready[stratum]]):
        places = np.flatnonzero(stratum == code)
        missing = max(int(state.reference_size[code]) - int(state.reference[code, 0]), 1)
        if len(places) >= missing:
            end = min(end, start + int(places[missing - 1]) + 1)
    return end


def _with_rows(config: DetectorConfig, state: StreamState, rows: Columns) -> StreamState:
    """The state that has counted these rows, put them in its history and in open reference periods."""
    reference, since = state.reference.copy(), state.reference_since.copy()
    earlier, sessions = sums_before(state.sessions, rows.session, rows.x, rows.log_length)
    for code in np.unique(rows.stratum[~state.ready[rows.stratum]]):
        places = np.flatnonzero(rows.stratum == code)
        own = rows[places]
        if reference[code, 0] == 0:
            since[code] = own.ended_at(0)
        reference[code] = add_terms(
            reference[code], terms(own.x, own.log_length, own.drafted, own.accepted, earlier[places])
        )
    return replace(
        state,
        ordinal=int(rows.ordinal[-1]),
        drafted_requests=state.drafted_requests
        + np.bincount(rows.stratum, minlength=len(state.drafted_requests)),
        reference=reference,
        reference_since=since,
        sessions=sessions,
        in_session=state.in_session + int((rows.session != NO_SESSION).sum()),
        history=state.history.followed_by(rows, config.history),
    )


def _after_tests(
    state: StreamState, base: Baselines, incident: OpenIncident, direction: int
) -> tuple[StreamState, list[Finding]]:
    """Ends the incident when none of its recovery tests is undecided."""
    if (incident.outcome == WAITING).any():
        return _with_incident(state, direction, incident), []
    finding = closed(state, base, history_rows(state), incident, direction)
    return _ended(state, direction, finding.ended_at), [finding]


def _check_reference(
    config: DetectorConfig, before: StreamState, state: StreamState, batch: ObservationBatch, row: Columns
) -> tuple[StreamState, list[Finding]]:
    """Ends the reference period of the row's stratum, or lengthens it, when its size is reached."""
    code = int(row.stratum[0])
    sums = state.reference[code]
    if state.ready[code] or sums[0] < state.reference_size[code]:
        return state, []
    state, needed = _learned(config, state, code)
    if needed > sums[0]:
        sizes = state.reference_size.copy()
        sizes[code] = needed
        return replace(state, reference_size=sizes), []
    why = state.why_learning(code)
    ready = state.ready_ordinal.copy()
    ready[code] = row.ordinal[0]
    if not state.ready.any():
        seen = _counted(before, state, batch[: int(row.place[0]) + 1])
        state = replace(state, requests_per_day=_requests_per_day(seen), steady_since=row.ended_at(0))
    state = replace(state, ready_ordinal=ready)
    return state, [_baseline_ready(config, state, code, row, why)]


def _learned(config: DetectorConfig, state: StreamState, code: int) -> tuple[StreamState, int]:
    """The state that learned from the windows of a reference period, and the size that the period needs."""
    if not state.of_windows[code]:
        return state, needed_requests(state.reference[code], config.minimum_drop)
    rows = history_rows(state)
    own = rows[np.flatnonzero(rows.stratum == code)][-int(state.reference[code, 0]) :]
    if len(own) < WINDOW_REFERENCE:  # other traffic pushed them out of the history
        return state, int(state.reference[code, 0]) + WINDOW_REFERENCE
    windows = state.windows.copy()
    windows[code] = learn(own.x, own.drafted.astype(np.float64))
    return replace(state, windows=windows), 0


def _baseline_ready(
    config: DetectorConfig, state: StreamState, code: int, row: Columns, why: str
) -> BaselineReady:
    sums = state.reference[code]
    mean, spread, margin = _level(config, state, code)
    return BaselineReady(
        segment=state.names[state.segment_of_stratum[code]],
        stratum=str(unpack(int(state.setting_of_stratum[code]))),
        reason=why,
        ordinal=int(row.ordinal[0]),
        ended_at=row.ended_at(0),
        since=float(state.reference_since[code]),
        requests=int(sums[0]),
        acceptance=baseline_of(state, code),
        mean_per_request=mean,
        standard_deviation=spread,
        fall_below=max(mean - margin, 0.0),
        rise_above=min(mean + margin, 1.0),
        false_alarm_every=config.threshold(state.requests_per_day),
    )


def _level(config: DetectorConfig, state: StreamState, code: int) -> tuple[float, float, float]:
    """(mean, standard deviation, margin) of a stratum at the mean length, or at typical traffic."""
    if state.of_windows[code]:
        learned = state.windows[code : code + 1]
        typical = learned[:, 3]
        at_typical = window_margin(learned, typical, config.ignore)
        return float(learned[0, 0]), float(deviation(learned, typical)[0]), float(at_typical[0])
    base = baselines(state.reference[code])
    margin = max(float(base.error_factor * base.mean_error), config.ignore)
    return float(base.mean), float(np.sqrt(base.variance)), margin


def _requests_per_day(state: StreamState) -> float:
    """Traffic measured so far; 0 where all requests ended at one moment."""
    span = state.last_ended_at - state.first_ended_at
    return state.requests / span * SECONDS_PER_DAY if span > 0 else 0.0


def _counted(before: StreamState, state: StreamState, batch: ObservationBatch) -> StreamState:
    """`state` with the totals of `before` and the whole batch."""
    earliest, latest = float(batch.ended_at.min()), float(batch.ended_at.max())
    first = before.requests == 0
    drafted = np.flatnonzero(batch.drafted > 0)
    undrafted = (batch.drafted == 0) & ~_windows(batch)  # an idle window says nothing about drafting
    in_a_row = int(undrafted[drafted[-1] + 1 :].sum() if len(drafted) else undrafted.sum())
    in_a_row += 0 if len(drafted) else before.undrafted_in_a_row
    return replace(
        state,
        ordinal=int(batch.ordinal[-1]),
        requests=before.requests + len(batch),
        undrafted=before.undrafted + len(batch) - len(drafted),
        undrafted_in_a_row=in_a_row,
        first_ended_at=earliest if first else min(before.first_ended_at, earliest),
        last_ended_at=latest if first else max(before.last_ended_at, latest),
    )


def _with_incident(state: StreamState, direction: int, incident: OpenIncident | None) -> StreamState:
    down, up = state.incidents
    return replace(state, incidents=(incident, up) if direction == 0 else (down, incident))


def _ended(state: StreamState, direction: int, at: float) -> StreamState:
    return replace(without_evidence(_with_incident(state, direction, None), direction), steady_since=at)


def end_incident(state: StreamState, direction: Direction) -> StreamState:
    """The state without its open incident, evidence started anew: when a person resolved it by hand."""
    return _ended(state, DIRECTIONS.index(direction), state.last_ended_at)
