"""An operator accepts a new normal: the baseline of what changed is learned anew, and says so."""

from __future__ import annotations

import numpy as np

from driftguard.detection.findings import Direction
from driftguard.detection.fold import end_incident
from driftguard.detection.state.stream_state import DIRECTIONS, OPERATOR, StreamState
from driftguard.detection.steps.new_normal import learned_anew


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
    for other, name in zip(state.incidents, DIRECTIONS, strict=True):
        if other is not None and np.isin(other.segments, incident.segments).any():
            state = end_incident(state, name)
    return learned_anew(state, incident, OPERATOR)
