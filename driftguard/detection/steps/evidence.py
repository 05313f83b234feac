"""The evidence against "nothing changed": one sum of bets per stratum and one for the stream.

Per request of a watched stratum c, for every bet j and either direction (`bets.py`):

    R_cj <- (w + R_cj) e_cj        G_j <- (1 + G_j) e_cj
    S = mean_j G_j / 2 + sum over c of mean_j R_cj / 2
    an alarm when 3/4 S_down >= A (a fall) or 1/4 S_up >= A (a rise, which pages nobody and may take longer)

w is what is put on the bets that begin at the request: 1 where there is one segment, else what the
segment was given since its last request (below). m_c may differ from request to request as long
as it is known before x is (`expectation.py`). The evidence of a segment is the sum over its strata. Where a
session's earlier requests pull the expectation along, stakes follow the age of the bets (`bets.py`).
Where observations depend on each other and no session says which, bets are charged for it (`bets.py`).

Assumptions: E[x | past] >= m_c in every stratum (for a rise: <= its mirror image) and, where `bets.py` cuts
the best requests, that those are no better than in the reference period; nothing else about the
distribution of x, and nothing about the mix of strata or its dependence on time. Guarantee: G grows by at
most 1 per request in expectation, and sum_c R_c, of which one request moves one stratum, by what is put on
bets, which adds up to no more. So S of either direction grows by at most 1, and 3/4 S_down + 1/4 S_up - t
is a supermartingale. An alarm needs one of these two terms to reach A, hence E[requests to the first false
alarm] >= A, over both directions and all segments, without a correction for their number. Papers: Shin,
Ramdas, Rinaldo 2023 (e-detectors); segments are ranked by M_(k) >= A/k, which bounds the error over
patience of those named (`fleet.py` says what that is; Dandapanthula, Ramdas 2025).

**What is put on the bets that begin at a request.** A stream may begin one bet per request. Of C segments
that are watched each is given 1 / C of it, and puts what it was given on its next request: w_t = g_t / C,
where g_t counts the drafted requests of the stream since the one at which the segment last began bets. All
segments thus begin equally much. With one bet per request of its own, a segment of a tenth of the traffic
would cause a tenth of the false alarms, and pay for that with a longer delay.

Invariant: the w of all requests up to t add up to t at most, whatever the mix does; w_t is known before x
is. It holds across a change of C because all begin anew then (`restart_bets`): what was given before is
lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.state.columns import Columns
from driftguard.detection.state.stream_state import Ints, StreamState
from driftguard.detection.statistics.baseline import Baselines
from driftguard.detection.statistics.bets import (
    DOWN,
    LANES,
    SMALLEST_VARIANCE,
    UP,
    Floats,
    InSessions,
    Offers,
    Running,
    aging_sums,
    last_per_group,
    mean_over_bets,
    offers,
    running_sums,
    stakes,
)
from driftguard.detection.statistics.windows import LARGEST_SHORTFALL, relative_variance
from driftguard.detection.steps.expectation import (
    change_shown,
    deviations_of_first,
    request_variance,
    safe_baseline,
    with_margins,
)

BOUND = 2.0  # standard errors below the estimate of a distance
LEAST_PART = 0.25  # of the estimate: the bound of a few requests is below 0
SMALLEST_GAP = 0.002  # between before and after, so that what is told has a direction, and so a recovery test
SMALLEST_WEIGHT = 1e-9
SHARES = (0.75, 0.25)  # of the evidence: down, up


@dataclass(frozen=True, slots=True)
class WatchRun:
    """The evidence after each of the W watched requests among the T of a step."""

    places: NDArray[np.intp]  # [W] among the T
    clock: Ints  # [W] how many drafted requests the stream has had up to each
    stratum: NDArray[np.uint16]  # [W]
    of_stream: Running  # [W, LANES] G_j
    of_stratum: Running  # [W, LANES] R_cj of the request's own stratum c
    totals: Floats  # [2, W] the share of S of either direction

    def first_alarm(self, direction: int, threshold: float, begin: int = 0) -> int | None:
        """Place among the T requests of the first alarm from place `begin` on, if any."""
        over = (self.totals[direction] >= threshold) & (self.places >= begin)
        return int(self.places[over.argmax()]) if over.any() else None


def watch(state: StreamState, base: Baselines, rows: Columns) -> WatchRun:
    return _watch(state, base, rows, int(state.drafted_requests.sum()))


def _watch(state: StreamState, base: Baselines, rows: Columns, seen: int) -> WatchRun:
    """`seen` drafted requests of the stream came before these rows."""
    places = np.flatnonzero(state.ready[rows.stratum])
    watched = rows[places]
    segments, clock = int(watched_segments(state).sum()), seen + 1 + places
    begin = put_on_bets(watched.segment, clock, state.begun, segments)
    one = np.zeros(len(state.ready), dtype=np.intp)
    run = run_evidence(state, one, of_streams([state]), base, watched, clock, begin)
    return replace(run, places=places)


def of_streams(states: Sequence[StreamState]) -> Running:
    """Of each stream as a whole [G, LANES]."""
    return Running(
        np.array([state.stream_evidence for state in states]),
        np.array([state.stream_mean_start for state in states]),
    )


def of_strata(state: StreamState) -> Running:
    """Of each stratum [C, LANES]."""
    return Running(state.stratum_evidence, state.stratum_mean_start)


def run_evidence(
    state: StreamState,
    stream_of: NDArray[np.intp],
    streams: Running,
    base: Baselines,
    rows: Columns,
    clock: Ints,
    begin: Floats,
) -> WatchRun:
    """The evidence after each of W watched rows of G streams, the streams one after the other.

    `stream_of` [C] is each stratum's stream, `streams` [G, LANES] theirs before the rows, `clock` [W] the
    count of the stream's drafted requests at each row, `begin` [W] what is put on the bets that begin there.
    """
    stream, strata = stream_of[rows.stratum], of_strata(state)
    in_sessions = np.zeros(len(streams.evidence), dtype=np.bool_)
    in_sessions[stream_of[state.ready & (base.between > 0.0)]] = True
    # Every row counts twice: for its stream and for its stratum.
    group = np.concatenate([stream, len(streams.evidence) + rows.stratum.astype(np.intp)])
    begin, start = np.concatenate([np.ones(len(rows)), begin]), streams.followed_by(strata)
    run = Running(np.empty((len(group), LANES)), np.empty((len(group), LANES)))
    for sums, chosen in ((_ageless, ~in_sessions), (_aging, in_sessions)):
        own = np.flatnonzero(chosen[stream])
        if 0 < len(own) < len(rows):
            both = np.concatenate([own, own + len(rows)])
            run[both] = sums(state, base, rows[own], clock[own], start, group[both], begin[both])
        elif len(own):  # all of them, as those of one stream always
            run = sums(state, base, rows, clock, start, group, begin)
    of_stream, of_stratum = run[: len(rows)], run[len(rows) :]
    totals = _totals(strata.evidence, stream_of, rows.stratum, of_stream.evidence, of_stratum.evidence)
    return WatchRun(np.arange(len(rows)), clock, rows.stratum, of_stream, of_stratum, totals)


def keep_evidence(state: StreamState, run: WatchRun, stop: int) -> StreamState:
    """The state with the evidence after the first `stop` requests of the step."""
    watched = int(np.searchsorted(run.places, stop))
    if watched == 0:
        return state
    strata = of_strata(state).last_per_group(run.stratum[:watched], run.of_stratum[:watched])
    segments = state.segment_of_stratum[run.stratum[:watched]]
    return replace(
        state,
        stream_evidence=run.of_stream.evidence[watched - 1].copy(),
        stream_mean_start=run.of_stream.mean_start[watched - 1].copy(),
        stratum_evidence=strata.evidence,
        stratum_mean_start=strata.mean_start,
        begun=last_per_group(state.begun, segments, run.clock[:watched]),
    )


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


def evidence_anew(
    state: StreamState,
    base: Baselines,
    ignore: float,
    history: Columns,
    directions: Sequence[int] = (0, 1),
) -> StreamState:
    """The state with its evidence of these directions collected anew from the history [T], which ends with
    its last observation.

    What is older than the history is lost, and so is the age of sessions: both make evidence smaller.
    """
    history = with_margins(state, base, ignore, history)
    # Most streams have counted their evidence of both directions since the same observation.
    runs = {
        since: _run_since(state, base, history, since)
        for since in {state.evidence_since[d] for d in directions}
    }
    after = state
    for direction in directions:
        run, lanes = runs[state.evidence_since[direction]], (DOWN, UP)[direction]
        if len(run.places) == 0:
            after = without_evidence(after, direction)
            continue
        stream, strata = after.stream_evidence.copy(), after.stratum_evidence.copy()
        stream[lanes] = run.of_stream.evidence[-1, lanes]
        none = np.zeros_like(strata)
        strata[:, lanes] = last_per_group(none, run.stratum, run.of_stratum.evidence)[:, lanes]
        after = replace(after, stream_evidence=stream, stratum_evidence=strata)
    return after


def _run_since(state: StreamState, base: Baselines, history: Columns, since: int) -> WatchRun:
    """The evidence of what comes after the ordinal `since` in the history, from nothing."""
    from_then_on = np.maximum(since, state.ready_ordinal)[history.stratum]
    rows = history[np.flatnonzero(state.ready[history.stratum] & (history.ordinal > from_then_on))]
    seen = int(state.drafted_requests.sum()) - int((history.ordinal > since).sum())
    blank = replace(
        state,
        stream_evidence=np.zeros(LANES),
        stratum_evidence=np.zeros_like(state.stratum_evidence),
        begun=np.where(watched_segments(state), seen, 0),
    )
    return _watch(blank, base, rows, seen)


def segment_evidence(state: StreamState, direction: int) -> Floats:
    """M of each segment [S]: the sum over its strata."""
    of_stratum = mean_over_bets(state.stratum_evidence[:, (DOWN, UP)[direction]])
    evidence = np.zeros(len(state.names))
    np.add.at(evidence, state.segment_of_stratum, of_stratum)
    return evidence


def evidence_of_stream(state: StreamState, direction: int) -> float:
    """M of the stream as a whole."""
    return float(mean_over_bets(state.stream_evidence[(DOWN, UP)[direction]]))


def ranked(evidence: Floats, threshold: float) -> list[int]:
    """Segments named by an alarm: the first k in order of evidence M [C], k the last with M_(k) >= A / k."""
    order = np.argsort(-evidence, kind="stable")
    passes = evidence[order] * np.arange(1, len(order) + 1) >= threshold
    named = int(np.flatnonzero(passes).max()) + 1 if passes.any() else 0
    return [int(code) for code in order[:named]]


def bets_on(state: StreamState, base: Baselines, rows: Columns, *, rise: bool) -> Floats:
    """e [T, BETS] of a fall (or rise)."""
    return bets_against(state, base, rows, safe_baseline(rows, rise=rise), rise=rise)


def _ageless(
    state: StreamState,
    base: Baselines,
    rows: Columns,
    _: Ints,
    start: Running,
    group: NDArray[np.intp],
    begin: Floats,
) -> Running:
    """Of streams in which no session moves what is expected: their bets are the same at any age. e = 0, which
    keeps sums at 0, where nothing is collected (`_collecting`)."""
    bets = np.hstack([bets_on(state, base, rows, rise=rise) for rise in (False, True)])
    sums = running_sums(start.evidence, group, np.tile(bets, (2, 1)) * _collecting(state, rows), begin)
    return Running(sums, start.mean_start[group])


def _collecting(state: StreamState, rows: Columns) -> Floats:
    """1 where T rows count for their stream (the first T) and for their stratum (the next T) [2 T, LANES].

    While an incident is open, its segments and the stream as a whole collect no evidence of its direction: it
    is known that they changed. The other segments go on.
    """
    collecting = np.ones((2 * len(rows), LANES))
    for lanes, incident in zip((DOWN, UP), state.incidents, strict=True):
        if incident is not None:
            collecting[: len(rows), lanes] = 0.0
            collecting[len(rows) :, lanes] = ~np.isin(rows.segment, incident.segments)[:, None]
    return collecting


def _aging(
    state: StreamState,
    base: Baselines,
    rows: Columns,
    clock: Ints,
    start: Running,
    group: NDArray[np.intp],
    begin: Floats,
) -> Running:
    """Of streams with sessions."""
    offered = [
        offers_against(state, base, rows, safe_baseline(rows, rise=rise), rise=rise) for rise in (False, True)
    ]
    parts = base.within[rows.stratum], base.between[rows.stratum], rows.fresh
    requests = InSessions(
        gain=np.hstack([own.gain for own in offered]),
        most=np.hstack([own.most for own in offered]),
        scale=np.where(rows.fresh > 0.0, deviations_of_first(*parts), 0.0),
        clock=clock.astype(np.float64),
        open_for=rows.open_for,
        pulled=1.0 - rows.fresh,
        inflation=offered[0].inflation,
    )
    run = aging_sums(start, group, requests[np.tile(np.arange(len(rows)), 2)], begin)
    collecting = _collecting(state, rows)
    return Running(run.evidence * collecting, run.mean_start * collecting)


def _totals(
    before: Floats,
    stream_of: NDArray[np.intp],
    stratum: NDArray[np.uint16],
    of_stream: Floats,
    of_stratum: Floats,
) -> Floats:
    """The share of S of either direction after each row [2, W]; the strata begin at `before` [C, LANES].

    A stream's strata are added one by one in fixed order: batching changes no bit.
    """
    stream = stream_of[stratum]
    strata = np.bincount(stream_of)
    first = np.cumsum(strata) - strata
    # Of each stream its strata as they were, then its rows: the newest of a stratum is the one furthest on.
    begins = first + np.searchsorted(stream, np.arange(len(strata)))
    of_row = np.arange(len(stream)) + np.cumsum(strata)[stream]
    of_start = np.arange(len(stream_of)) + (begins - first)[stream_of]
    means = np.empty((len(before) + len(of_stratum), 2))
    totals = np.empty((len(of_stream), 2))
    for direction, lanes in enumerate((DOWN, UP)):
        means[of_start, direction] = mean_over_bets(before[:, lanes])
        means[of_row, direction] = mean_over_bets(of_stratum[:, lanes])
        totals[:, direction] = mean_over_bets(of_stream[:, lanes])
    start, strata_of_row = begins[stream], strata[stream]
    place = stratum - first[stream]  # of the row's stratum among those of its stream
    for nth in range(int(strata.max(initial=0))):
        newest = np.maximum.accumulate(np.where(place == nth, of_row, start + nth))
        if nth < strata.min():
            totals += means[newest]
        else:  # where a stream has no such stratum, `newest` may lie beyond the end
            has = strata_of_row > nth
            totals[has] += means[newest[has]]
    shared: Floats = totals.T * np.array(SHARES)[:, None] / 2.0
    return shared


def put_on_bets(group: NDArray[np.integer[Any]], clock: Ints, begun: Ints, segments: Ints | int) -> Floats:
    """w of each of W requests.

    `group` [W] is whose segment each request is of, `clock` [W] how many drafted requests its stream has
    had up to it, `begun` that count when the segment last began bets, `segments` ([W], or one for all) C.
    """
    order = np.argsort(group, kind="stable")
    previous = np.empty_like(clock)
    previous[order[1:]] = clock[order[:-1]]
    first = order[np.flatnonzero(np.diff(group[order].astype(np.int64), prepend=-1))]
    previous[first] = begun[group[first]]
    share: Floats = (clock - previous) / np.maximum(segments, 1)
    return share


def watched_segments(state: StreamState) -> NDArray[np.bool_]:
    """Which segments [S] have a stratum with a baseline."""
    return watched_among(len(state.names), state.segment_of_stratum, state.ready)


def watched_among(
    segments: int, segment_of_stratum: NDArray[np.integer[Any]], ready: NDArray[np.bool_]
) -> NDArray[np.bool_]:
    """The same of segments and strata [C] that need not be of one stream."""
    watched = np.zeros(segments, dtype=np.bool_)
    watched[segment_of_stratum[ready]] = True
    return watched


def restart_bets(state: StreamState) -> StreamState:
    """The state in which all watched segments begin bets from now on."""
    now = int(state.drafted_requests.sum())
    return replace(state, begun=np.where(watched_segments(state), now, 0))


def offers_against(
    state: StreamState, base: Baselines, rows: Columns, boundary: Floats, *, rise: bool
) -> Offers:
    """What these rows offer to bet on: x below `boundary` [T] (above, for a rise)."""
    own = rows.stratum
    cut = state.cut_off[own, (UP if rise else DOWN)]
    x, variance = rows.x, variance_of_rows(state, base, rows)
    windows = np.flatnonzero(state.of_windows[own])
    if len(windows):
        reach = LARGEST_SHORTFALL * np.sqrt(np.maximum(variance[windows], SMALLEST_VARIANCE))
        x = x.copy()
        x[windows] = np.clip(x[windows], boundary[windows] - reach, boundary[windows] + reach)
    return offers(x, boundary, variance, rise=rise, cut=cut, inflation=base.inflation[own])


def variance_of_rows(state: StreamState, base: Baselines, rows: Columns) -> Floats:
    """Of x [T] given the past, not inflated; of windows by their traffic."""
    own = rows.stratum
    variance = request_variance(base.within[own], base.between[own], rows.fresh)
    windows = np.flatnonzero(state.of_windows[own])
    if len(windows):
        drafted = rows.drafted[windows].astype(np.float64)
        variance[windows] *= relative_variance(state.windows[own[windows]], drafted)
    return variance


def halfway_at_least(
    state: StreamState, base: Baselines, rows: Columns, told: Floats, *, rise: bool
) -> tuple[Floats, Floats]:
    """(told [T, 4], halfway [T]) after each of T requests since a change point: the sums over them and those
    before them, and half the distance between before and after, as far as is sure.

    `told` [4] are the sums so far: requests, fresh^2, fresh x moved, moved^2; a request lies `moved` from
    what was expected on the side of the change.

    Formula: distance d by least squares, less BOUND standard errors, and LEAST_PART d at least. The spread is
    that of the requests around d, and no less than that before the change.
    """
    moved = rows.x - rows.expected if rise else rows.expected - rows.x
    of_each = np.column_stack([np.ones(len(rows)), rows.fresh**2, rows.fresh * moved, moved**2])
    told = np.cumsum(np.concatenate([told[None], of_each]), axis=0)[1:]
    requests, weight, product, square = told.T
    weight = np.maximum(weight, SMALLEST_WEIGHT)
    distance = product / weight
    spread = np.maximum((square - distance * product) / requests, variance_of_rows(state, base, rows))
    error = np.sqrt(spread * state.inflation[rows.stratum] / weight)
    least = np.maximum(distance - BOUND * error, LEAST_PART * distance)
    return told, np.clip(least, SMALLEST_GAP, 1.0) / 2.0


def bets_against(
    state: StreamState, base: Baselines, rows: Columns, boundary: Floats, *, rise: bool
) -> Floats:
    """e [T, BETS] of the same, on a change at any time."""
    shown = change_shown(base.within[rows.stratum], base.between[rows.stratum], rows.fresh)
    return offers_against(state, base, rows, boundary, rise=rise).factors(stakes(shown))
