"""How dependent the observations of a stream are is measured for as long as it lives.

At growing distances, and at least every LONGEST_INTERVAL drafted observations, what the newest ones lie above
what was expected of them is added to the sums of `long_run_variance.py`, and the inflation of every stratum
is measured anew. The reference period measured it first.

A change must not pass for dependence, nor dependence for a change. The newest LAG observations of a stratum
wait for the next time, so that a large change is found before it is counted. Where there is evidence of
SUSPECTED, all wait from where it begins: until it has gone down again, or until so many wait that a change is
no likelier than a mix that wanders. Meanwhile what waits counts around its own mean, which one change at once
does not move. Beside it counts what blocks of all requests in the history show that follow each other,
whether an incident is open or not (`block_differences.py`), but for those from before a profile of hours,
days or prompts was learned (`cycles.py`): what it explains now was no dependence.

**What an incident covered.** While it is open its segments count nothing from its change point on, and once
it is over never do: a fault of .20 for 500 requests would count as f = 30, and two or three would hide the
next one. Blocks of any size go on behind it, so that no edge is in them; of the interval before the change
point only what is likelier unchanged counts. Of blocks that follow each other, those of the change are a run
of their own (`changed_stretch`).

A mean that wanders raises alarms and comes back as well, and would do so again and again if its widest
excursions were left out. What tells them apart is how far they go. Let tau be the largest standard deviation
of a mean that wanders which the blocks counted so far leave possible (`largest_wander`, for the least
variance of one that the reference period leaves possible: else short blocks say 0 where it was estimated too
large), and g the level of n requests of a change, less their baseline. The first change that a stratum comes
back from is left out in any case; a later one is counted as wandering, all of it, where

    |g| <= OUTLYING (tau^2 + f v / n)^(1/2)

Assumptions: a mean that wanders is about normal around its baseline, where one level in 16,000 lies further
off; and blocks outside of incidents show how far it wanders. Incidents cut off the widest excursions, which
makes tau smaller; that it is an upper limit makes up for it. Simulated: the second and later excursions of
users whose mean wanders (memory of 300 to 10,000 requests, standard deviation .03 to .05) went up to 3.5 tau,
faults of .10 to .30 in independent requests from 6 tau on. Where the baseline is so young, or so few requests
come in an hour, that tau is a quarter of a fault, the second such fault counts as wandering.

Where the inflation grows, evidence that was collected with a smaller one is collected anew, from the history.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.config import DetectorConfig
from driftguard.detection.state.columns import Columns, history_rows, requests_since
from driftguard.detection.state.stream_state import (
    DIRECTIONS,
    RECOVERED,
    Floats,
    Ints,
    OpenIncident,
    StreamState,
)
from driftguard.detection.statistics.baseline import REQUESTS, Baselines, baselines, line_of, sessions_tell
from driftguard.detection.statistics.bets import DOWN, UP, mean_over_bets
from driftguard.detection.statistics.block_differences import inflation_shown
from driftguard.detection.statistics.change_point import changed_stretch, likeliest_point
from driftguard.detection.statistics.long_run_variance import (
    LIKE_REQUESTS,
    LIKE_SECONDS,
    OF_REQUESTS,
    OF_WINDOWS,
    BlockMeans,
    Caution,
    Together,
    add_to_blocks,
    inflation,
    largest_wander,
    least_variance,
    of_residuals,
)
from driftguard.detection.statistics.turns import looked_at, without_learned
from driftguard.detection.steps.evidence import bets_on, evidence_anew

SHORTEST_INTERVAL, LONGEST_INTERVAL = 1, 1_024  # drafted observations of the stream between two measurements
LAG_OF_REQUESTS, LAG_OF_WINDOWS = 32, 8
SUSPECTED = 10.0  # evidence from which on observations may be those of a change
# So many such observations wait before they are counted: three times as many as the alarm of a drop of
# SMALL_DROP takes, PATIENCE f v / drop^2. Of windows f counts up to WANDERING only: a larger one tells how
# far their tasks wander, and these may be about to wander further.
WANDERING = 4.0
PATIENCE, LEAST_PATIENCE_REQUESTS, LEAST_PATIENCE_WINDOWS = 75.0, 512.0, 32.0
SMALL_DROP_OF_REQUESTS, SMALL_DROP_OF_WINDOWS = 0.05, 0.10
YOUNG, YOUNG_DEPENDENT = 2_000, 3_000  # requests of the stream, see `is_young`
_OLD = YOUNG_DEPENDENT + LONGEST_INTERVAL
OUTLYING = 4.0  # standard deviations of a mean that wanders, beyond which a level is none of its own
OTHERWISE = 0  # the first ordinal of what was held against another expectation, among changes
RECOLLECTED = 1.25  # an inflation that grows by more makes evidence void


def caution_of(state: StreamState, code: int) -> Caution:
    return OF_WINDOWS if state.of_windows[code] else OF_REQUESTS


def longest_block(state: StreamState, code: int, now: float) -> float:
    """In observations, at `now` in seconds since 1970."""
    seconds = now - float(state.reference_since[code])
    if state.of_windows[code] or seconds <= 0.0:
        return math.inf
    return max(float(state.drafted_requests[code]) / seconds * LIKE_SECONDS, LIKE_REQUESTS)


def may_wander(state: StreamState, code: int) -> bool:
    """Are the observations of a stratum requests of users that nothing names? Where sessions say what belongs
    together their expectation follows them; windows have margins of their own (`long_run_variance.py`)."""
    return not state.of_windows[code] and not sessions_tell(state.reference[code])


def is_young(state: StreamState, code: int) -> bool:
    """Has the stream had too few requests since the stratum has a baseline to show how far its mean wanders?

    Requests that depend on each other show it later. Where they do not, what strata before it have shown
    counts: a segment that comes late, or is rare, is taken to be as independent inside as they are.
    """
    return bool(state.ready[code]) and may_wander(state, code) and of_stream_young_for(state, code) > 0


def young_for(state: StreamState, code: int) -> float:
    """How many requests more of a young stratum, at its present share of the stream."""
    return of_stream_young_for(state, code) * float(
        state.drafted_requests[code] / state.drafted_requests.sum()
    )


def of_stream_young_for(state: StreamState, code: int) -> int:
    """Requests of the stream; below 0 where it was."""
    if state.inflation[code] > 1.0:
        return YOUNG_DEPENDENT - _age(state, code)
    alike = np.flatnonzero(state.ready & ~state.of_windows & (state.inflation == 1.0))
    return YOUNG - _age(state, int(alike[state.ready_ordinal[alike].argmin()]))  # the oldest


def known_inflation(state: StreamState, strata: NDArray[np.integer]) -> float:
    """Of these strata of a segment; while one of them is young, the largest of all strata of the segment: its
    requests come of the same users with other settings."""
    if any(_age(state, code) < YOUNG_DEPENDENT for code in np.unique(strata).tolist()):
        strata = np.flatnonzero(state.segment_of_stratum == state.segment_of_stratum[strata[0]])
    return float(state.inflation[strata].max())


def _age(state: StreamState, code: int) -> int:
    """How many requests the stream has had since the stratum has a baseline, up to as many as is ever asked.
    Ordinals do not tell: they count those of all streams."""
    return requests_since(state, int(state.ready_ordinal[code]), _OLD)


def wander_possible(state: StreamState, base: Baselines, rows: Columns, code: int) -> float:
    """The largest standard deviation that the mean of a stratum may wander with, from the history.

    What may be of a change counts around its own mean.
    """
    newest = _newest(state, base, rows, code)
    blocks = _added(state.blocks[code], int(state.counted[code]), newest.counts)
    counted = int(state.counted[code]) + len(newest.counts)
    blocks = _added(blocks, counted, newest.waits)
    return largest_wander(
        blocks,
        counted + len(newest.waits),
        float(base.variance[code]),
        caution_of(state, code),
        longest_block(state, code, rows.ended_at(-1)),
    )


@dataclass(frozen=True, slots=True)
class _Newest:
    """Of a stratum: what its observations in the history lie above what was expected of them."""

    runs: list[Floats]  # all: those at the baseline, then those of each change that is known
    counts: Floats  # not counted yet, and of no change
    waits: Floats  # not counted yet, and perhaps of a change: around their own mean
    ordinal: Ints  # of `counts`


def _newest(state: StreamState, base: Baselines, rows: Columns, code: int) -> _Newest:
    own = _watched(state, rows, code)
    residual, uncounted = own.x - own.expected, own.ordinal > state.counted_until[code]
    of_change = own.ordinal >= _doubtful_from(state, base, rows, code)
    counts, waits = np.flatnonzero(uncounted & ~of_change), residual[uncounted & of_change]
    around = waits - waits.mean() if len(waits) else waits
    return _Newest(_runs(state, code, own.ordinal, residual), residual[counts], around, own.ordinal[counts])


def _watched(state: StreamState, rows: Columns, code: int) -> Columns:
    """Those of the stratum that were held against its baseline."""
    held = rows.expected > 0.0  # 0: of a reference period that ended before them
    return rows[np.flatnonzero((rows.stratum == code) & (rows.ordinal > state.ready_ordinal[code]) & held)]


def _runs(state: StreamState, code: int, ordinal: Ints, residual: Floats) -> list[Floats]:
    """The residuals of a stratum at its baseline, then those of each change that is known."""
    changes = state.past_changes[state.past_changes[:, 0] == code, 1:].tolist()
    for incident in state.incidents:
        if incident is not None and state.segment_of_stratum[code] in incident.segments:
            changes.append([incident.since_in(state.segment_of_stratum[code]), state.ordinal])
    anew = _otherwise_until(state, code)
    ordinal, residual = ordinal[ordinal > anew], residual[ordinal > anew]
    at_baseline, runs = np.ones(len(ordinal), dtype=np.bool_), []
    for first, last in changes:
        inside = at_baseline & (ordinal >= first) & (ordinal <= last)
        runs.append(residual[inside])
        at_baseline &= ~inside
    return [residual[at_baseline], *runs]


def _otherwise_until(state: StreamState, code: int) -> int:
    """The last ordinal of what was held against another expectation than now; 0: there is none."""
    changes = state.past_changes
    return int(changes[(changes[:, 0] == code) & (changes[:, 1] == OTHERWISE), 2].max(initial=0))


def _means(
    state: StreamState, base: Baselines, code: int, now: float, blocks: Floats, counted: int
) -> BlockMeans:
    return BlockMeans.of(
        blocks,
        counted,
        float(base.variance[code]),
        int(state.reference[code, REQUESTS]),
        caution_of(state, code),
        longest=longest_block(state, code, now),
    )


def _means_with(state: StreamState, base: Baselines, code: int, now: float, residuals: Floats) -> BlockMeans:
    """The same with these residuals after those that have been counted."""
    counted = int(state.counted[code])
    blocks = _added(state.blocks[code], counted, residuals)
    return _means(state, base, code, now, blocks, counted + len(residuals))


def begun(state: StreamState, code: int, ordinal: int) -> StreamState:
    """The state whose stratum goes on from the sums of its reference period, which ended at this observation.

    Where sessions say what belongs together it begins anew: what is bet on there is what a request lies above
    the expectation that its session gives.
    """
    blocks, counted, until = state.blocks.copy(), state.counted.copy(), state.counted_until.copy()
    sums = state.reference[code]
    until[code] = ordinal
    if sessions_tell(sums):
        blocks[code], counted[code] = 0.0, 0
    else:
        counted[code] = int(sums[REQUESTS])
        blocks[code] = of_residuals(blocks[code], int(counted[code]), *line_of(sums))
    return replace(state, blocks=blocks, counted=counted, counted_until=until)


def measured_after(config: DetectorConfig, total: int) -> int:
    """How many drafted observations the stream has at the next measurement, after one at `total`."""
    return total + min(max(total // 8, SHORTEST_INTERVAL), LONGEST_INTERVAL, config.history // 4)


def measured(config: DetectorConfig, state: StreamState) -> StreamState:
    """The state that has counted its newest observations, and measured the inflation of every stratum."""
    state = replace(state, next_measured=measured_after(config, int(state.drafted_requests.sum())))
    rows = history_rows(state)
    base = baselines(state.reference, state.inflation, state.measured_at, state.of_windows)
    present = np.unique(rows.stratum[state.ready[rows.stratum]]).tolist()
    newest = {code: _newest(state, base, rows, code) for code in present}
    state = _counted(state, newest)
    found, at = state.inflation.copy(), state.measured_at.copy()
    at[present] = state.drafted_requests[present]
    for code, inflation_found in _found(state, base, rows.ended_at(-1), newest).items():
        found[code] = inflation_found
    grown = found > RECOLLECTED * state.inflation
    state = replace(state, inflation=found, measured_at=at, turns=_turns_learned(config, state))
    if not grown.any():
        return state
    base = baselines(state.reference, state.inflation, state.measured_at, state.of_windows)
    return evidence_anew(state, base, config.ignore, rows)


def _turns_learned(config: DetectorConfig, state: StreamState) -> Floats:
    """`turns` of the state that has learned from those that waited, where nothing has changed meanwhile."""
    if state.in_session == 0:
        return state.turns
    strata = range(len(state.ready))
    doubtful = [_is_changed(state, code) or in_doubt(config, state, code) for code in strata]
    return looked_at(state.turns, np.array(doubtful, dtype=np.bool_))


def _counted(state: StreamState, newest: dict[int, _Newest]) -> StreamState:
    """The state that has counted what its strata have had since, but for what may be of a change."""
    blocks, counted, until = state.blocks.copy(), state.counted.copy(), state.counted_until.copy()
    for code, own in newest.items():
        lag = LAG_OF_WINDOWS if state.of_windows[code] else LAG_OF_REQUESTS
        ready = max(len(own.counts) + min(len(own.waits) - lag, 0), 0)
        if ready:
            until[code] = own.ordinal[ready - 1]
        blocks[code] = _added(blocks[code], int(counted[code]), own.counts[:ready])
        counted[code] += ready
    return replace(state, blocks=blocks, counted=counted, counted_until=until)


def _found(state: StreamState, base: Baselines, now: float, newest: dict[int, _Newest]) -> dict[int, float]:
    """The inflation of each of these strata.

    Of requests they are looked at together as well: without what may be of a change, and with it.
    """
    means = {
        code: _means(state, base, code, now, state.blocks[code], int(state.counted[code]))
        for code in np.flatnonzero(state.ready).tolist()
    }
    of_requests = {code: one for code, one in means.items() if not state.of_windows[code]}
    with_waiting = of_requests | {
        code: _means_with(state, base, code, now, own.waits)
        for code, own in newest.items()
        if len(own.waits) and may_wander(state, code) and not _is_changed(state, code)
    }
    together = Together.of(list(of_requests.values()), list(with_waiting.values()))
    found = {code: inflation(means[code]) for code in newest if code not in of_requests}
    for code in newest.keys() & of_requests.keys():
        found[code] = max(inflation(one[code], together) for one in (of_requests, with_waiting))
        if may_wander(state, code):
            found[code] = max(found[code], _of_neighbours(state, base, code, now, newest[code].runs))
    return found


def _of_neighbours(
    state: StreamState, base: Baselines, code: int, now: float, runs: Sequence[Floats]
) -> float:
    """The inflation of a stratum that its blocks show which follow each other."""
    # One that is not known yet, and what is not exact in those that are.
    changes = 2 if _is_changed(state, code) or state.recoveries[code] > 0 else 1
    variance, reference = float(base.variance[code]), int(state.reference[code, REQUESTS])
    # Until they are learned the hours of a day look like a mean that wanders.
    against_mean = math.inf if _age(state, code) < YOUNG else longest_block(state, code, now)
    return inflation_shown(runs, variance, reference, changes, against_mean=against_mean)


def _added(blocks: Floats, counted: int, residual: Floats) -> Floats:
    return add_to_blocks(blocks, counted, residual, np.zeros(len(residual)))


def measured_anew(state: StreamState, strata: NDArray[np.bool_]) -> StreamState:
    """The state that has counted nothing of these strata [C] so far: what is expected of them has changed."""
    codes = np.flatnonzero(strata)
    otherwise = np.stack([codes, np.full_like(codes, OTHERWISE), np.full_like(codes, state.ordinal)], axis=1)
    before = (state.past_changes[:, 1] == OTHERWISE) & strata[state.past_changes[:, 0]]
    return replace(
        state,
        blocks=np.where(strata[:, None, None], 0.0, state.blocks),
        counted=np.where(strata, 0, state.counted),
        counted_until=np.where(strata, state.ordinal, state.counted_until),
        inflation=np.where(strata, 1.0, state.inflation),
        recoveries=np.where(strata, 0, state.recoveries),
        turns=without_learned(state.turns, strata),
        past_changes=np.concatenate([state.past_changes[~before], otherwise]),
    )


def after_withheld(state: StreamState) -> StreamState:
    """The state after an alarm that was withheld: what raised it is counted nowhere."""
    return replace(state, counted_until=np.where(state.ready, state.ordinal, state.counted_until))


def after_incident(state: StreamState, incident: OpenIncident) -> StreamState:
    """The state when an incident has ended: whether what it covered counts as dependence (see above)."""
    rows, came_back = history_rows(state), bool((incident.outcome == RECOVERED).any())
    base = baselines(state.reference, state.inflation, state.measured_at, state.of_windows)
    until, recoveries = state.counted_until.copy(), state.recoveries.copy()
    past = state.past_changes[state.past_changes[:, 2] >= rows.ordinal[0]]
    for code in np.flatnonzero(state.ready & np.isin(state.segment_of_stratum, incident.segments)).tolist():
        own = _watched(state, rows, code)
        began = incident.since_in(state.segment_of_stratum[code])
        # What an earlier change of it covers is no part of this one.
        behind = past[(past[:, 0] == code) & (past[:, 2] < began), 2].max(initial=-1)
        own = own[np.flatnonzero((own.ordinal >= incident.earliest) & (own.ordinal > behind))]
        since, again = int(np.searchsorted(own.ordinal, began)), recoveries[code] > 0
        recoveries[code] += came_back and began > _otherwise_until(state, code)
        if since < len(own):
            first, last = changed_stretch(own.x - own.expected, since)
            changed = own[first : last + 1]
            if came_back and again and _may_have_wandered(state, base, code, changed):
                continue
            change = np.array([[code, changed.ordinal[0], changed.ordinal[-1]]])
            past = np.concatenate([past, change])
        until[code] = state.ordinal
    return replace(state, counted_until=until, recoveries=recoveries, past_changes=past)


def _may_have_wandered(state: StreamState, base: Baselines, code: int, changed: Columns) -> bool:
    """Is the level of these observations one to which a mean may wander that wanders as far as the stratum's
    sums of blocks leave possible?"""
    variance, counted = float(base.variance[code]), int(state.counted[code])
    longest = longest_block(state, code, changed.ended_at(-1))
    least = least_variance(variance, int(state.reference[code, REQUESTS]))
    wander = largest_wander(state.blocks[code], counted, least, caution_of(state, code), longest)
    error = float(state.inflation[code]) * variance / len(changed)
    level = float((changed.x - changed.expected).mean())
    return abs(level) <= OUTLYING * math.sqrt(wander**2 + error)


def _doubtful_from(state: StreamState, base: Baselines, rows: Columns, code: int) -> int:
    """The ordinal from which on the stratum's observations may be those of a change, or past all of them."""
    patience = _patience(state, base, code)
    begins = [state.ordinal + 1]
    for direction, incident in enumerate(state.incidents):
        if incident is not None and state.segment_of_stratum[code] in incident.segments:
            begins.append(incident.since_in(state.segment_of_stratum[code]))
            continue
        if evidence_in(state, code, direction) < SUSPECTED:
            continue
        behind = max(state.ready_ordinal[code], state.evidence_since[direction])
        since = rows[np.flatnonzero((rows.stratum == code) & (rows.ordinal > behind))]
        if len(since):
            start = likeliest_point(bets_on(state, base, since, rise=direction == 1))
            if len(since) - start <= patience:
                begins.append(int(since.ordinal[start]))
    return min(begins)


def _is_changed(state: StreamState, code: int) -> bool:
    """Is there an open incident of its segment?"""
    segment = state.segment_of_stratum[code]
    return any(incident is not None and segment in incident.segments for incident in state.incidents)


def _patience(state: StreamState, base: Baselines, code: int) -> float:
    variance, inflation = float(base.variance[code]), float(base.inflation[code])
    if state.of_windows[code]:
        dependent = min(inflation, WANDERING) * variance
        return max(LEAST_PATIENCE_WINDOWS, PATIENCE * dependent / SMALL_DROP_OF_WINDOWS**2)
    dependent = inflation * variance
    # What waited for as long as the stratum was young is not counted before its alarm is raised.
    young = may_wander(state, code) and _age(state, code) < _OLD
    least = math.inf if young else LEAST_PATIENCE_REQUESTS
    return max(least, PATIENCE * dependent / SMALL_DROP_OF_REQUESTS**2)


def in_doubt(config: DetectorConfig, state: StreamState, code: int) -> bool:
    """Is half of the evidence for an alarm there (of its logarithm), of either direction?"""
    half = config.threshold(state.requests_per_day) ** 0.5
    return any(evidence_in(state, code, direction) >= half for direction in range(len(DIRECTIONS)))


def evidence_in(state: StreamState, code: int, direction: int) -> float:
    """The larger one of a stratum's and of its stream's."""
    lanes = (DOWN, UP)[direction]
    sums = [state.stratum_evidence[code], state.stream_evidence]
    return max(float(mean_over_bets(evidence[lanes])) for evidence in sums)
