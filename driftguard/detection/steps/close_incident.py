"""From a decided recovery to what is said about it."""

from __future__ import annotations

import numpy as np

from driftguard.detection.findings import DriftClosed, SegmentChange
from driftguard.detection.state.columns import Columns
from driftguard.detection.state.stream_state import DIRECTIONS, OpenIncident, StreamState
from driftguard.detection.statistics.baseline import Baselines
from driftguard.detection.statistics.change_point import locate
from driftguard.detection.steps.at_baseline import acceptance_over, at_baseline
from driftguard.detection.steps.recovery import RECOVERED, recovery_bets


def closed(
    state: StreamState, base: Baselines, rows: Columns, incident: OpenIncident, direction: int
) -> DriftClosed:
    """At the request that decided the last recovery test, the last of `rows` (the history as columns)."""
    changes = (
        _back(state, base, rows, incident, place, direction) for place in range(len(incident.segments))
    )
    return DriftClosed(
        direction=DIRECTIONS[direction],
        ordinal=state.ordinal,
        ended_at=rows.ended_at(-1),
        opened_ordinal=incident.opened_ordinal,
        change_point=incident.change_point,
        reason="recovered" if (incident.outcome == RECOVERED).any() else "no_traffic",
        segments=tuple(change for change in changes if change is not None),
    )


def _back(
    state: StreamState, base: Baselines, rows: Columns, incident: OpenIncident, place: int, direction: int
) -> SegmentChange | None:
    """The segment's acceptance since it came back past the midpoint; None where it sent nothing since."""
    code = int(incident.segments[place])
    since = rows.ordinal > incident.opened_ordinal
    own = rows[np.flatnonzero((rows.segment == code) & since & state.ready[rows.stratum])]
    if len(own) == 0:
        return None
    halfway = np.full(len(own), incident.halfway[place])
    begun = locate(recovery_bets(state, base, own, halfway, fall=direction == 0)).point
    back = own[begun:]
    after = acceptance_over(state, back)
    return SegmentChange(state.names[code], at_baseline(state, back), after, float(incident.evidence[place]))
