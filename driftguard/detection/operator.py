"""What an operator may say of a change: its level is the new normal, or it comes every day or every week."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Literal

import numpy as np

from driftguard.detection.findings import Direction
from driftguard.detection.fold import end_incident, leave_incident
from driftguard.detection.state.stream_state import DIRECTIONS, OPERATOR, StreamState
from driftguard.detection.statistics.baseline import baselines
from driftguard.detection.statistics.factors import FACTORS, taken_as_usual
from driftguard.detection.steps.cycles import against_other_baselines
from driftguard.detection.steps.new_normal import learned_anew


def accept_new_normal(state: StreamState, direction: Direction) -> StreamState:
    """The state whose changed segments begin new reference periods at the incident's change point.

    Ends the open incident of this direction; one of the other direction holds the same segments no longer.
    The history since the change point counts as the beginning of the reference period, except
    where it lacks what the baseline needs (answer lengths, sessions): then it begins with the next
    request. BaselineReady follows when it is complete. Without an open incident, the same state.
    """
    incident = state.incidents[DIRECTIONS.index(direction)]
    if incident is None:
        return state
    for each in DIRECTIONS:
        state = leave_incident(state, each, incident.names(state))
    return learned_anew(state, incident, OPERATOR)


def treat_as_usual(
    state: StreamState, direction: Direction, cycle: Literal["day", "week"], segments: Collection[str] = ()
) -> StreamState:
    """The state that expects the changed segments to change so in every day or week, as those that are over
    say; from the next observation on, and whether or not they suffice to be sure. `segments`: those that are
    back already change so as well.

    Ends the open incident of this direction. Nothing else changes where no such cycle is over that counts, or
    where what it says is used already and has not moved. Without an open incident, the same state.
    """
    incident = state.incidents[DIRECTIONS.index(direction)]
    if incident is None:
        return state
    state = end_incident(state, direction)
    place = next(place for place, known in enumerate(FACTORS) if known.name == cycle)
    profile = state.profiles[place]
    base = baselines(state.reference, state.inflation, state.measured_at, state.of_windows)
    is_changed = np.isin(state.names, [*incident.names(state), *segments])
    changed = state.ready & is_changed[state.segment_of_stratum]
    after = taken_as_usual(profile, FACTORS[place], changed, base.inflation * base.variance)
    anew = (after.used != profile.used) | (after.moved != profile.moved)
    if not anew.any():
        return state
    profiles = (*state.profiles[:place], after, *state.profiles[place + 1 :])
    return against_other_baselines(replace(state, profiles=profiles), anew, place, state.ordinal)
