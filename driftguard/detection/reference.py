"""Reference periods under way: what they count, when they are long enough, and what is said then.

Their size is counted in requests, not in time: on a busy stream it is seconds of traffic, and what moves
more slowly than that (batch sizes that follow the load, say) is in no baseline and may count as a change.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from driftguard.detection.at_baseline import baseline_of
from driftguard.detection.baseline import add_terms, baselines, blocks_of, needed_requests, terms
from driftguard.detection.columns import Columns, history_rows
from driftguard.detection.config import DetectorConfig
from driftguard.detection.counting import counted, requests_per_day
from driftguard.detection.dependence import add_neighbours
from driftguard.detection.findings import BaselineReady, Finding
from driftguard.detection.observations import ObservationBatch
from driftguard.detection.rhythm import HOURS
from driftguard.detection.sessions import NO_SESSION
from driftguard.detection.state import Floats, StreamState
from driftguard.detection.strata import unpack
from driftguard.detection.windows import WINDOW_REFERENCE, deviation, learn, window_margin

SECONDS_PER_HOUR = 3600.0


def requests_until_check(state: StreamState, rows: Columns) -> int:
    """How many of the rows the next check of a reference period may not go beyond."""
    end = len(rows)
    for code in np.unique(rows.stratum[~state.ready[rows.stratum]]):
        places = np.flatnonzero(rows.stratum == code)
        missing = max(int(state.reference_size[code]) - int(state.reference[code, 0]), 1)
        if len(places) >= missing:
            end = min(end, int(places[missing - 1]) + 1)
    return end


def with_reference(state: StreamState, rows: Columns, session_before: Floats) -> StreamState:
    """The state whose open reference periods have counted their rows; `session_before` [T, 3]."""
    learning = np.unique(rows.stratum[~state.ready[rows.stratum]])
    if len(learning) == 0:
        return state
    reference, since, neighbours, hours = (
        column.copy()
        for column in (state.reference, state.reference_since, state.neighbours, state.rhythms.reference)
    )
    for code in learning:
        places = np.flatnonzero(rows.stratum == code)
        own = rows[places]
        if reference[code, 0] == 0:
            since[code] = own.ended_at(0)
        if not state.of_windows[code]:
            neighbours[code] = add_neighbours(
                neighbours[code], int(reference[code, 0]), own.x, own.log_length
            )
        added = terms(
            own.x,
            own.log_length,
            own.drafted,
            own.accepted,
            session_before[places],
            own.session != NO_SESSION,
        )
        reference[code] = add_terms(reference[code], added)
        hours[code] += np.bincount(own.hour, minlength=HOURS)
    return replace(
        state,
        reference=reference,
        reference_since=since,
        neighbours=neighbours,
        rhythms=replace(state.rhythms, reference=hours),
    )


def check_reference(
    config: DetectorConfig, before: StreamState, state: StreamState, batch: ObservationBatch, row: Columns
) -> tuple[StreamState, list[Finding]]:
    """Ends the reference period of the row's stratum, or lengthens it, when its size is reached.

    `before` is the state before the batch.
    """
    code = int(row.stratum[0])
    requests = state.reference[code, 0]
    if state.ready[code] or requests < state.reference_size[code]:
        return state, []
    if state.of_windows[code]:
        learned, needed = _windows_learned(state, code)
    else:
        learned, needed = _requests_learned(config, state, row, code)
    if needed > requests:
        sizes = state.reference_size.copy()
        sizes[code] = needed
        return replace(state, reference_size=sizes), []
    why, state = state.why_learning(code), learned
    ready = state.ready_ordinal.copy()
    ready[code] = row.ordinal[0]
    if not state.ready.any():
        seen = counted(before, state, batch[: int(row.place[0]) + 1])
        state = replace(state, requests_per_day=requests_per_day(seen), steady_since=row.ended_at(0))
    state = replace(state, ready_ordinal=ready)
    return state, [_baseline_ready(config, state, code, row, why)]


def _requests_learned(
    config: DetectorConfig, state: StreamState, row: Columns, code: int
) -> tuple[StreamState, int]:
    """The state that has the blocks of a reference period, and the size that the period needs."""
    sums = state.reference[code]
    seconds = row.ended_at(0) - float(state.reference_since[code])
    per_hour = float(sums[0]) / seconds * SECONDS_PER_HOUR if seconds > 0.0 else math.inf
    own, told_from = blocks_of(sums, state.neighbours[code], per_hour)
    blocks = state.blocks.copy()
    blocks[code] = own
    return replace(state, blocks=blocks), max(told_from, needed_requests(sums, own, config.minimum_drop))


def _windows_learned(state: StreamState, code: int) -> tuple[StreamState, int]:
    """The state that has learned from the windows of a reference period, and the size that it needs."""
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
        block_length=int(state.block_length[code]),
    )


def _level(config: DetectorConfig, state: StreamState, code: int) -> tuple[float, float, float]:
    """(mean, standard deviation, margin) of a stratum at the mean length, or at typical traffic."""
    if state.of_windows[code]:
        learned = state.windows[code : code + 1]
        typical = learned[:, 3]
        at_typical = window_margin(learned, typical, config.ignore)
        return float(learned[0, 0]), float(deviation(learned, typical)[0]), float(at_typical[0])
    base = baselines(state.reference[code], state.blocks[code])
    margin = max(float(base.error_factor * base.mean_error), config.ignore)
    return float(base.mean), float(np.sqrt(base.variance)), margin
