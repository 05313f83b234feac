"""Days in the fold: where one ends, which requests it counts, and what changes when it is over.

The effects of the hours (`hourly_profile.py`) are what they are during a whole day. A step of the fold
therefore ends where a day ends that counts; a day with too few requests is forgotten without a halt.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.findings import Finding, RhythmLearned
from driftguard.detection.state.columns import Columns
from driftguard.detection.state.stream_state import DIRECTIONS, OpenIncident, StreamState
from driftguard.detection.statistics.baseline import Baselines
from driftguard.detection.statistics.hourly_profile import (
    HOURS,
    LEAST_REQUESTS,
    Rhythms,
    counts,
    day_over,
    days_begun,
    tallied,
)
from driftguard.detection.statistics.strata import unpack
from driftguard.detection.steps.evidence import without_evidence
from driftguard.detection.steps.expectation import line


def day_begins(state: StreamState, row: Columns, ignore: float) -> tuple[StreamState, list[Finding]]:
    """Before a step that begins with this row.

    Where a rhythm comes into use or is given up, the evidence of the stream starts anew: it was against
    other baselines.
    """
    ended, _ = days_begun(state.rhythms.day, state.rhythms.strays, row.day)
    if not ended:
        return state, []
    rhythms, changed = day_over(state.rhythms, int(row.day[0]), ignore)
    state = replace(state, rhythms=rhythms)
    if changed.any():
        state = replace(state, ordinal=int(row.ordinal[0]) - 1)  # evidence counts from this row on
        for direction in range(len(DIRECTIONS)):
            state = without_evidence(state, direction)
    return state, [_learned(state, int(code), row) for code in np.flatnonzero(changed)]


def _learned(state: StreamState, code: int, row: Columns) -> RhythmLearned:
    return RhythmLearned(
        segment=state.names[state.segment_of_stratum[code]],
        stratum=str(unpack(int(state.setting_of_stratum[code]))),
        ordinal=int(row.ordinal[0]),
        ended_at=row.ended_at(0),
        days=int(state.rhythms.days[code, 0]),
        amplitude=float(state.rhythms.amplitude[code]),
    )


def requests_until_day_counts(state: StreamState, rows: Columns) -> int:
    """How many of the rows come before the end of a day that counts for some stratum."""
    begun, _ = days_begun(state.rhythms.day, state.rhythms.strays, rows.day)
    start, seen = 0, state.rhythms.today[..., 0]
    for place, _ in begun:
        if place - start + seen.sum() >= LEAST_REQUESTS:
            cell = rows.stratum[start:place].astype(np.int64) * HOURS + rows.hour[start:place]
            seen = seen + np.bincount(cell, minlength=seen.size).reshape(seen.shape)
            if counts(seen[..., None]).any():
                return place
        start, seen = place, np.zeros_like(seen)
    return len(rows)


def with_hours(state: StreamState, rows: Columns) -> Columns:
    """The rows with the effects of their hours."""
    if not state.rhythms.used.any():
        return rows
    return replace(rows, rhythm=state.rhythms.effect[rows.stratum, rows.hour])


def tally(state: StreamState, base: Baselines, rows: Columns) -> Rhythms:
    """The state's rhythms after its day has counted the rows that hold evidence.

    Once a rhythm is used, a segment with an open incident says nothing about it.
    """
    told = state.ready[rows.stratum] & (rows.fresh > 0.0)
    for incident in state.incidents:
        if incident is not None:
            told &= ~_disturbed(state, incident)[rows.stratum]
    residual = np.where(told, rows.x - line(state, base, rows), 0.0)
    return tallied(state.rhythms, rows.stratum, rows.day, rows.hour, residual, told)


def without_today(state: StreamState, incident: OpenIncident) -> StreamState:
    """The state that forgets the day so far where an incident opens: the change lies within it."""
    today = np.where(_disturbed(state, incident)[:, None, None], 0.0, state.rhythms.today)
    return replace(state, rhythms=replace(state.rhythms, today=today))


def _disturbed(state: StreamState, incident: OpenIncident) -> NDArray[np.bool_]:
    return state.rhythms.used & np.isin(state.segment_of_stratum, incident.segments)
