"""The evidence against "nothing changed": one sum of bets per stratum and one for the stream.

Per request of a watched stratum c, for every bet j and either direction (`bets.py`):

    R_cj <- (1 + R_cj) e_cj        G_j <- (1 + G_j) e_cj
    S = mean_j G_j / 2 + sum over c of mean_j R_cj / 2, and an alarm when S / 2 >= A

m_c may differ from request to request as long as it is known before x is (`predictive.py`). The
evidence of a segment is the sum over its strata. Where neighbouring requests are alike and no session says
which, x is the mean of a block and e is 1 for all requests but its last (`blocks.py`).

Assumptions: E[x | past] >= m_c in every stratum (for a rise: <= its mirror image); nothing about the
distribution of x, the mix of strata, or its dependence on time.
Guarantee: each of G, and of sum_c R_c (one request moves one stratum), grows by at most 1 per request
in expectation, so S of either direction does, and (S_down + S_up) / 2 - t is a supermartingale. An
alarm needs half of one S to reach A, hence E[requests to the first false alarm] >= A, over both
directions and all segments, without a correction for their number.
Papers: Shin, Ramdas, Rinaldo 2023 (e-detectors); segments are ranked by M_(k) >= A/k, which bounds the
error over patience of those named (`fleet.py` says what that is; Dandapanthula, Ramdas 2025).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.baseline import Baselines
from driftguard.detection.bets import DOWN, LANES, UP, Floats, mean_over_bets, run_sums
from driftguard.detection.blocks import bets_against
from driftguard.detection.columns import Columns
from driftguard.detection.predictive import safe_baseline
from driftguard.detection.state import StreamState
from driftguard.detection.windows import window_factors

BOTH_DIRECTIONS = 2.0


@dataclass(frozen=True, slots=True)
class WatchRun:
    """The evidence after each of the W watched requests among the T of a step."""

    places: NDArray[np.intp]  # [W] among the T
    stream: Floats  # [W, LANES]
    strata: dict[int, tuple[NDArray[np.intp], Floats]]  # stratum: its n places among the W, [n, LANES]
    totals: Floats  # [2, W] S / 2 of either direction

    def first_alarm(self, direction: int, threshold: float) -> int | None:
        """Place among the T requests of the first alarm, if any."""
        over = self.totals[direction] >= threshold
        return int(self.places[over.argmax()]) if over.any() else None


def watch(state: StreamState, base: Baselines, rows: Columns) -> WatchRun:
    places = np.flatnonzero(state.ready[rows.stratum])
    watched = rows[places]
    bets = _bets(state, base, watched)
    paths = {}
    for code in np.unique(watched.stratum):
        own = np.flatnonzero(watched.stratum == code)
        paths[int(code)] = (own, run_sums(state.stratum_evidence[code], bets[own]))
    stream = run_sums(state.stream_evidence, bets)
    totals = np.stack([_totals(state, stream, paths, lanes) for lanes in (DOWN, UP)])
    return WatchRun(places, stream, paths, totals)


def keep_evidence(state: StreamState, run: WatchRun, stop: int) -> StreamState:
    """The state with the evidence after the first `stop` requests of the step."""
    watched = int(np.searchsorted(run.places, stop))
    if watched == 0:
        return state
    strata = state.stratum_evidence.copy()
    for code, (own, path) in run.strata.items():
        done = int(np.searchsorted(own, watched))
        if done:
            strata[code] = path[done - 1]
    return replace(state, stream_evidence=run.stream[watched - 1].copy(), stratum_evidence=strata)


def without_evidence(state: StreamState, direction: int) -> StreamState:
    """The state with the evidence of one direction started anew."""
    lanes = (DOWN, UP)[direction]
    stream, strata = state.stream_evidence.copy(), state.stratum_evidence.copy()
    stream[lanes] = 0.0
    strata[:, lanes] = 0.0
    since = (
        (state.ordinal, state.evidence_since[1])
        if direction == 0
        else (state.evidence_since[0], state.ordinal)
    )
    return replace(state, stream_evidence=stream, stratum_evidence=strata, evidence_since=since)


def segment_evidence(state: StreamState, direction: int) -> Floats:
    """M of each segment [S]: the sum over its strata."""
    of_stratum = mean_over_bets(state.stratum_evidence[:, (DOWN, UP)[direction]])
    evidence = np.zeros(len(state.names))
    np.add.at(evidence, state.segment_of_stratum, of_stratum)
    return evidence


def ranked(evidence: Floats, threshold: float) -> list[int]:
    """Segments named by an alarm: the first k in order of evidence M [C], k the last with M_(k) >= A / k."""
    order = np.argsort(-evidence, kind="stable")
    passes = evidence[order] * np.arange(1, len(order) + 1) >= threshold
    named = int(np.flatnonzero(passes).max()) + 1 if passes.any() else 0
    return [int(code) for code in order[:named]]


def bets_on(state: StreamState, base: Baselines, rows: Columns, *, rise: bool) -> Floats:
    """e [T, BETS] of a fall (or rise), as requests or as windows."""
    bets = bets_against(state, base, rows, safe_baseline(rows, rise=rise), rise=rise)
    places = np.flatnonzero(state.of_windows[rows.stratum])
    if len(places):
        own = rows[places]
        learned, drafted = state.windows[own.stratum], own.drafted.astype(np.float64)
        x = own.x - (own.expected - learned[:, 0])  # as if it had no rhythm
        bets[places] = window_factors(learned, x, drafted, own.margin, rise=rise)
    return bets


def _bets(state: StreamState, base: Baselines, rows: Columns) -> Floats:
    """e [W, LANES]. A direction with an open incident collects no evidence: e = 0 keeps its sums at 0."""
    bets = np.zeros((len(rows), LANES))
    for lanes, rise in ((DOWN, False), (UP, True)):
        if state.incidents[int(rise)] is None:
            bets[:, lanes] = bets_on(state, base, rows, rise=rise)
    return bets


def _totals(
    state: StreamState, stream: Floats, paths: dict[int, tuple[NDArray[np.intp], Floats]], lanes: slice
) -> Floats:
    """S / 2 [W] of one direction. Added stratum by stratum in fixed order: batching changes no bit."""
    total = mean_over_bets(stream[:, lanes])
    start = mean_over_bets(state.stratum_evidence[:, lanes])
    for code in range(len(start)):
        if code in paths:
            own, path = paths[code]
            seen = np.zeros(len(total), dtype=np.intp)
            seen[own] = 1
            values = np.concatenate([start[code : code + 1], mean_over_bets(path[:, lanes])])
            total += values[np.cumsum(seen)]
        else:
            total += start[code]
    return total / (2.0 * BOTH_DIRECTIONS)
