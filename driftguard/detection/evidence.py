"""The evidence against "nothing changed": one sum of bets per segment and one for the stream.

Per request of a watched segment c, for every bet j and either direction (`bets.py`):

    R_cj <- (1 + R_cj) e_cj        G_j <- (1 + G_j) e_cj
    S = mean_j G_j / 2 + sum over c of mean_j R_cj / 2, and an alarm when S / 2 >= A

Assumptions: E[x | past] >= m_c in every segment (for a rise: <= its mirror image); nothing about the
distribution of x, the mix of segments, or its dependence on time.
Guarantee: each of G, and of sum_c R_c (one request moves one segment), grows by at most 1 per request
in expectation, so S of either direction does, and (S_down + S_up) / 2 - t is a supermartingale. An
alarm needs half of one S to reach A, hence E[requests to the first false alarm] >= A, over both
directions and all segments, without a correction for their number.
Papers: Shin, Ramdas, Rinaldo 2023 (e-detectors); segments are ranked by M_(k) >= A/k, which controls
the false-discovery rate at the alarm (Dandapanthula, Ramdas 2025).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.baseline import Baselines
from driftguard.detection.bets import BETS, DOWN, LANES, UP, Floats, mean_over_bets, run_sums, stakes
from driftguard.detection.columns import Columns
from driftguard.detection.state import StreamState

BOTH_DIRECTIONS = 2.0


@dataclass(frozen=True, slots=True)
class WatchRun:
    """The evidence after each of the W watched requests among the T of a step."""

    places: NDArray[np.intp]  # [W] among the T
    stream: Floats  # [W, LANES]
    segments: dict[int, tuple[NDArray[np.intp], Floats]]  # segment: its n places among the W, [n, LANES]
    totals: Floats  # [2, W] S / 2 of either direction

    def first_alarm(self, direction: int, threshold: float) -> int | None:
        """Place among the T requests of the first alarm, if any."""
        over = self.totals[direction] >= threshold
        return int(self.places[over.argmax()]) if over.any() else None


def watch(state: StreamState, base: Baselines, rows: Columns) -> WatchRun:
    places = np.flatnonzero(state.ready[rows.segment])
    segment = rows.segment[places]
    bets = _bets(state, base, rows.x[places], segment)
    paths = {}
    for code in np.unique(segment):
        own = np.flatnonzero(segment == code)
        paths[int(code)] = (own, run_sums(state.segment_evidence[code], bets[own]))
    stream = run_sums(state.stream_evidence, bets)
    totals = np.stack([_totals(state, stream, paths, lanes) for lanes in (DOWN, UP)])
    return WatchRun(places, stream, paths, totals)


def keep_evidence(state: StreamState, run: WatchRun, stop: int) -> StreamState:
    """The state with the evidence after the first `stop` requests of the step."""
    watched = int(np.searchsorted(run.places, stop))
    if watched == 0:
        return state
    segments = state.segment_evidence.copy()
    for code, (own, path) in run.segments.items():
        done = int(np.searchsorted(own, watched))
        if done:
            segments[code] = path[done - 1]
    return replace(state, stream_evidence=run.stream[watched - 1].copy(), segment_evidence=segments)


def without_evidence(state: StreamState, direction: int) -> StreamState:
    """The state with the evidence of one direction started anew."""
    lanes = (DOWN, UP)[direction]
    stream, segments = state.stream_evidence.copy(), state.segment_evidence.copy()
    stream[lanes] = 0.0
    segments[:, lanes] = 0.0
    since = (
        (state.ordinal, state.evidence_since[1])
        if direction == 0
        else (state.evidence_since[0], state.ordinal)
    )
    return replace(state, stream_evidence=stream, segment_evidence=segments, evidence_since=since)


def ranked(evidence: Floats, threshold: float) -> list[int]:
    """Segments named by an alarm: the first k in order of evidence M [C], k the last with M_(k) >= A / k."""
    order = np.argsort(-evidence, kind="stable")
    passes = evidence[order] * np.arange(1, len(order) + 1) >= threshold
    named = int(np.flatnonzero(passes).max()) + 1 if passes.any() else 0
    return [int(code) for code in order[:named]]


def _bets(state: StreamState, base: Baselines, x: Floats, segment: NDArray[np.uint8]) -> Floats:
    """e [W, LANES]. A direction with an open incident collects no evidence: e = 0 keeps its sums at 0."""
    bets = np.zeros((len(x), LANES))
    if state.incidents[0] is None:
        stake = stakes(base.fall_below, base.variance)
        bets[:, :BETS] = 1.0 + stake[segment] * (base.fall_below[segment] - x)[:, None]
    if state.incidents[1] is None:
        stake = stakes(1.0 - base.rise_above, base.variance)
        bets[:, BETS:] = 1.0 + stake[segment] * (x - base.rise_above[segment])[:, None]
    return bets


def _totals(
    state: StreamState, stream: Floats, paths: dict[int, tuple[NDArray[np.intp], Floats]], lanes: slice
) -> Floats:
    """S / 2 [W] of one direction. Added segment by segment in fixed order: batching changes no bit."""
    total = mean_over_bets(stream[:, lanes])
    start = mean_over_bets(state.segment_evidence[:, lanes])
    for code in range(len(state.names)):
        if code in paths:
            own, path = paths[code]
            seen = np.zeros(len(total), dtype=np.intp)
            seen[own] = 1
            values = np.concatenate([start[code : code + 1], mean_over_bets(path[:, lanes])])
            total += values[np.cumsum(seen)]
        else:
            total += start[code]
    return total / (2.0 * BOTH_DIRECTIONS)
