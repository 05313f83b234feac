"""An alarm of a young stratum is confirmed, by its size or by its age.

How far the mean of requests wanders, because users differ that nobody names, shows only in time: a fall of
.05 and users that differ by .05 look alike in the first thousand requests of a stream. Young is a stratum
until the stream has had `dependence.YOUNG` requests since its baseline is known, or that of another stratum
which shows no dependence; and longer where its requests are seen to depend on each other. Its alarm is raised
at once only where it would be one with wider margins: by WIDER tau, with tau the largest standard deviation
of such a wander that its requests so far leave possible (`long_run_variance.largest_wander`), and by WIDEST
at most: a draft that breaks is told at once. The evidence is collected anew against them, from the history.
The steadier a young stratum is, the smaller are the changes that it tells of at once.

Else the alarm waits until the stratum is no longer young. Users that differ have shown it by then in what
came since: the inflation grows, and takes the evidence away. A change that lasts keeps it. What waits is not
counted as dependent (`dependence.py`), and joins no reference period.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.state.columns import Columns
from driftguard.detection.state.stream_state import Floats, StreamState
from driftguard.detection.statistics.baseline import Baselines
from driftguard.detection.statistics.bets import DOWN, UP, mean_over_bets
from driftguard.detection.steps.dependence import is_young, wander_possible
from driftguard.detection.steps.evidence import SHARES, evidence_anew, evidence_of_stream

WIDER: Final = 3.0
WIDEST: Final = 0.12  # of acceptance
LOOKS: Final = 128  # from one look to the next the stream becomes older by such a part


def is_confirmed(
    ignore: float,
    state: StreamState,
    base: Baselines,
    history: Columns,
    direction: int,
    threshold: float,
) -> bool:
    """May the alarm after the newest request of the history be raised?"""
    young = np.array([is_young(state, code) for code in range(len(state.ready))])
    if not young.any():
        return True
    of_others = _of_strata(state, direction)[~young].sum()
    if SHARES[direction] * of_others / 2.0 >= threshold:
        return True
    careful = replace(base, unseen=base.unseen + _wider(state, base, young, history))
    return _total(evidence_anew(state, careful, ignore, history, [direction]), direction) >= threshold


def looked_at_later(state: StreamState, direction: int) -> StreamState:
    """The state whose alarm of this direction waits for the next look."""
    seen = int(state.drafted_requests.sum())
    next_look = seen + max(seen // LOOKS, 4)
    down, up = state.next_alarm
    return replace(state, next_alarm=(next_look, up) if direction == 0 else (down, next_look))


def _wider(state: StreamState, base: Baselines, young: NDArray[np.bool_], rows: Columns) -> Floats:
    """How much wider the margins of strata are [C]; 0 of those that are not young."""
    wider = np.zeros(len(young))
    for code in np.flatnonzero(young).tolist():
        wider[code] = wider_margin(state, base, rows, code)
    return wider


def wider_margin(state: StreamState, base: Baselines, rows: Columns, code: int) -> float:
    """By how much the margin of a young stratum is wider; `rows`: the history."""
    return min(WIDER * wander_possible(state, base, rows, code), WIDEST)


def _total(state: StreamState, direction: int) -> float:
    """The share of S of a direction (`evidence.py`)."""
    of_strata = float(_of_strata(state, direction).sum())
    return SHARES[direction] * (evidence_of_stream(state, direction) + of_strata) / 2.0


def _of_strata(state: StreamState, direction: int) -> Floats:
    """R_c of each stratum [C]."""
    return np.asarray(mean_over_bets(state.stratum_evidence[:, (DOWN, UP)[direction]]))
