"""An operator accepts a new normal: the baseline of what changed is learned anew, and says so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from driftguard.detection.findings import Direction
from driftguard.detection.fold import end_incident
from driftguard.detection.state.columns import history_rows
from driftguard.detection.state.stream_state import DIRECTIONS, NOT_READY, StreamState
from driftguard.detection.statistics.baseline import FIRST_CHECK
from driftguard.detection.statistics.sessions import KNOWN, OpenSessions
from driftguard.detection.statistics.windows import WINDOW_REFERENCE
from driftguard.detection.steps.evidence import restart_bets
from driftguard.detection.steps.reference_period import with_reference


def accept_new_normal(state: StreamState, direction: Direction) -> StreamState:
    """The state whose changed segments begin new reference periods at the incident's change point.

    Ends the open incident of this direction, and one of the other direction that names one of the same
    segments. The history since the change point counts as the beginning of the reference period, except
    where it lacks what the baseline needs (answer lengths, sessions): then it begins with the next
    request. BaselineReady follows when it is complete. Without an open incident, the same state.
    """
    incident = state.incidents[DIRECTIONS.index(direction)]
    if incident is None:
        return state
    anew = np.isin(state.segment_of_stratum, incident.segments)
    for other, name in zip(state.incidents, DIRECTIONS, strict=True):
        if other is not None and np.isin(other.segments, incident.segments).any():
            state = end_incident(state, name)
    rows = history_rows(state)
    rows = rows[np.flatnonzero(rows.ordinal >= incident.change_point)]
    first_size = np.where(state.of_windows, WINDOW_REFERENCE, FIRST_CHECK)
    state = replace(
        state,
        reference=np.where(anew[:, None], 0.0, state.reference),
        reference_size=np.where(anew, first_size, state.reference_size),
        ready_ordinal=np.where(anew, NOT_READY, state.ready_ordinal),
        stratum_evidence=np.where(anew[:, None], 0.0, state.stratum_evidence),
        joining=np.where(anew[:, None, None], 0.0, state.joining),
        growing=state.growing & ~anew,
        cut_off=np.where(anew[:, None], np.nan, state.cut_off),
        accepted_anew=state.accepted_anew | anew,
        blocks=np.where(anew[:, None, None], 0.0, state.blocks),
        counted=np.where(anew, 0, state.counted),
        inflation=np.where(anew, 1.0, state.inflation),
        recoveries=np.where(anew, 0, state.recoveries),
        measured_at=np.where(anew, 0, state.measured_at),
        rhythms=state.rhythms.without(anew),
        sessions=OpenSessions.empty(),
    )
    state = restart_bets(state)
    known = [code for code in np.flatnonzero(anew) if _history_suffices(state, int(code))]
    rows = rows[np.flatnonzero(np.isin(rows.stratum, known))]
    return with_reference(state, rows, np.zeros((len(rows), KNOWN)))


def _history_suffices(state: StreamState, code: int) -> bool:
    known = state.setting_of(code)
    return known.kind == "window" or (not known.length_known and state.in_session == 0)
