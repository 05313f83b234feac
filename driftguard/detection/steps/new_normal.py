"""A level that is here to stay becomes the norm: the baseline of what changed is learned anew, and says so.

An operator says so, or a rise lasts: where it has not gone back in LASTS observations of a segment, a fall
from the new level must be found, and against the old baseline it would only be a recovery. A dozen windows
make a baseline on a busy server: a rise from it is the norm where it lasts LASTS_TIMES as long. A fall that
lasts never becomes the norm by itself.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from driftguard.detection.findings import DriftClosed, SegmentChange
from driftguard.detection.state.columns import Columns, history_rows
from driftguard.detection.state.stream_state import (
    ALONE,
    DIRECTIONS,
    NOT_READY,
    WAITING,
    OpenIncident,
    StreamState,
)
from driftguard.detection.statistics.baseline import FIRST_CHECK, REQUESTS
from driftguard.detection.statistics.sessions import KNOWN, OpenSessions
from driftguard.detection.statistics.windows import WINDOW_REFERENCE
from driftguard.detection.steps.evidence import restart_bets
from driftguard.detection.steps.expectation import acceptance_over, at_baseline
from driftguard.detection.steps.first_part import without_bins
from driftguard.detection.steps.reference_period import with_reference

LASTS_REQUESTS, LASTS_WINDOWS = 5_000, 1_440
LASTS_TIMES = 4  # the windows of the baseline: four fifths of all there were are at the new level then


def parted(state: StreamState, rise: OpenIncident) -> tuple[OpenIncident | None, OpenIncident | None]:
    """(the segments that have shown the rise for long enough, the others); None where there are none. A rare
    segment does not keep the others from it, nor one that has also fallen."""
    own = np.isin(state.segment_of_stratum, rise.segments)
    enough = LASTS_REQUESTS
    if state.of_windows[own].all():
        enough = min(LASTS_TIMES * int(state.reference[own, REQUESTS].max()), LASTS_WINDOWS)
    waiting = rise.outcome[rise.test] == WAITING
    seen = rise.seen[rise.test]
    shared = rise.common != ALONE
    seen[shared] = rise.seen[rise.common[shared]]
    lasts = waiting & (seen >= enough)
    fall = state.incidents[0]
    if fall is not None:
        lasts &= ~np.isin(rise.segments, fall.segments)
    if not lasts.any():
        return None, rise
    return (rise, None) if lasts[waiting].all() else (rise.of_segments(lasts), rise.of_segments(~lasts))


def became_normal(
    state: StreamState, rows: Columns, incident: OpenIncident, direction: int, left: OpenIncident | None
) -> DriftClosed:
    """What is said of a rise that lasts; `rows`: the history as columns; `left`: what goes on of it."""
    watched = _since_change(state, rows[np.flatnonzero(state.ready[rows.stratum])], incident)
    changes = []
    for place, code in enumerate(incident.segments.tolist()):
        own = watched[np.flatnonzero(watched.segment == code)]
        if len(own):
            evidence = float(incident.evidence[place])
            levels = at_baseline(state, own), acceptance_over(state, own)
            changes.append(SegmentChange(state.names[code], *levels, evidence))
    return DriftClosed(
        direction=DIRECTIONS[direction],
        ordinal=state.ordinal,
        ended_at=rows.ended_at(-1),
        opened_ordinal=incident.opened_ordinal,
        change_point=incident.change_point,
        reason="became_normal",
        segments=tuple(changes),
        left=() if left is None else left.names(state),
    )


def learned_anew(state: StreamState, incident: OpenIncident, why: int) -> StreamState:
    """The state whose segments of this incident, which is over, begin new reference periods where they
    changed. The history since then counts, except where it lacks what the baseline needs (answer lengths,
    sessions): then they begin with the next request."""
    anew = np.isin(state.segment_of_stratum, incident.segments)
    rows = _since_change(state, history_rows(state), incident)
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
        accepted_anew=np.where(anew, why, state.accepted_anew).astype(np.uint8),
        blocks=np.where(anew[:, None, None], 0.0, state.blocks),
        counted=np.where(anew, 0, state.counted),
        inflation=np.where(anew, 1.0, state.inflation),
        recoveries=np.where(anew, 0, state.recoveries),
        measured_at=np.where(anew, 0, state.measured_at),
        profiles=tuple(profile.without(anew) for profile in state.profiles),
        turns=np.where(anew[:, None, None], 0.0, state.turns),
        sessions=OpenSessions.empty(),
    )
    state = restart_bets(without_bins(state, np.flatnonzero(anew)))
    known = [code for code in np.flatnonzero(anew) if _history_suffices(state, int(code))]
    rows = rows[np.flatnonzero(np.isin(rows.stratum, known))]
    return with_reference(state, rows, np.zeros((len(rows), KNOWN)))


def _since_change(state: StreamState, rows: Columns, incident: OpenIncident) -> Columns:
    """Of its segments, from their changes on."""
    return rows[np.flatnonzero(rows.ordinal >= incident.since(len(state.names))[rows.segment])]


def _history_suffices(state: StreamState, code: int) -> bool:
    known = state.setting_of(code)
    return known.kind == "window" or (not known.length_known and state.in_session == 0)
