"""Reference periods: what they count, when they are long enough, how they grow, and what is said then.

Their size is counted in requests, not in time: on a busy stream it is seconds of traffic, and what moves
more slowly than that (batch sizes that follow the load, say) is in no baseline and may count as a change.

A stratum is watched as soon as its baseline is known well enough for the drops that matter. The error of
its mean is then the largest part of the margin, and of the delay. The reference period therefore grows
while it is watched, until that error no longer decides (two standard errors are at most `ignore`) or a
day has passed, because over days a slow decline must not be learned. Requests join in blocks of a
quarter of its size, each block only when the next one is full too and no evidence of a change has come up
to half the logarithm of A (`evidence.py`), in its stratum or the stream; else both are dropped, and at an
alarm all are. So a fall joins by accident only where hardly any evidence of it comes within a whole block.
The bets stay fair: what a request is held against is known before it. But the mean is looked at up to a
dozen times, so that 2 se fail somewhere in about 5% of strata instead of 2%, until more requests mend it.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.config import DetectorConfig
from driftguard.detection.findings import BaselineReady, BaselineSettled, Finding, WhyBegun
from driftguard.detection.observations import ObservationBatch
from driftguard.detection.state.columns import Columns, counted, history_rows, requests_per_day
from driftguard.detection.state.stream_state import LASTED, Floats, StreamState
from driftguard.detection.statistics.baseline import (
    FIRST_CHECK,
    REQUESTS,
    SUMS,
    add_terms,
    baselines,
    line_of,
    needed_requests,
    sessions_tell,
    terms,
    usual_windows,
    variance_of,
)
from driftguard.detection.statistics.bets import NORMAL_CUT_OFF, NOT_CUT, cut_off
from driftguard.detection.statistics.factors import (
    CELLS,
)
from driftguard.detection.statistics.long_run_variance import (
    BlockMeans,
    add_to_blocks,
    inflation,
    of_residuals,
)
from driftguard.detection.statistics.sessions import KNOWN, NO_SESSION
from driftguard.detection.statistics.turns import LEARNED, LEVEL, NEWEST, REFERENCE, level_terms, turn_terms
from driftguard.detection.statistics.windows import (
    WINDOW_REFERENCE,
    learn,
    lifetime,
    needed_windows,
    odd_start,
)
from driftguard.detection.steps.cycles import cells_of, with_reference_cells
from driftguard.detection.steps.dependence import begun, caution_of, in_doubt, longest_block
from driftguard.detection.steps.evidence import restart_bets, watched_segments
from driftguard.detection.steps.expectation import (
    baseline_of,
    margin_of,
    unseen_of,
)
from driftguard.detection.steps.first_part import (
    LEAST_DROPS,
    begun_anew,
    first_part,
    shift_within,
    with_bins,
    without_bins,
)

GROWTH_STEPS = 4  # a block of requests that joins is a quarter of what is there
LONGEST_GROWTH_SECONDS = 86_400.0


def requests_until_check(state: StreamState, rows: Columns) -> int:
    """How many of the rows the next check of a reference period may not go beyond."""
    missing = np.where(
        state.ready,
        requests_until_joining(state),
        np.maximum(state.reference_size - state.reference[:, REQUESTS], 1.0),
    )
    end = len(rows)
    for code in np.unique(rows.stratum[(~state.ready | _grows(state))[rows.stratum]]):
        places = np.flatnonzero(rows.stratum == code)
        if len(places) >= missing[code]:
            end = min(end, int(places[int(missing[code]) - 1]) + 1)
    return end


def requests_until_joining(state: StreamState) -> Floats:
    """Until the next block of a growing reference period is full [C]; infinity where none grows."""
    least = np.where(state.of_windows, float(WINDOW_REFERENCE), float(FIRST_CHECK))
    block = np.maximum(least, state.reference[:, REQUESTS] // GROWTH_STEPS)
    return np.where(_grows(state), block - state.joining[:, 1, REQUESTS], np.inf)


def _grows(state: StreamState) -> NDArray[np.bool_]:
    """Where reference periods grow [C]: nowhere while an incident is open, but for those that began as a rise
    had lasted, while it goes on in other segments."""
    down, up = state.incidents
    if down is not None:
        return np.zeros_like(state.growing)
    if up is None:
        return state.growing
    others = ~np.isin(state.segment_of_stratum, up.segments)
    return np.asarray(state.growing & others & (state.accepted_anew == LASTED))


def with_reference(state: StreamState, rows: Columns, session_before: Floats) -> StreamState:
    """The state whose open reference periods have counted their rows; `session_before` [T, KNOWN]."""
    learning = np.unique(rows.stratum[~state.ready[rows.stratum]])
    if len(learning) == 0:
        return state
    reference, since, blocks = (
        column.copy() for column in (state.reference, state.reference_since, state.blocks)
    )
    cells = cells_of(rows)
    added = np.zeros((len(reference), CELLS))
    turns = state.turns.copy()
    for code in learning:
        places = np.flatnonzero(rows.stratum == code)
        own = rows[places]
        if reference[code, REQUESTS] == 0:
            since[code] = own.ended_at(0)
        blocks[code] = add_to_blocks(blocks[code], int(reference[code, REQUESTS]), own.x, own.log_length)
        of_terms = _terms(own, session_before[places])
        state = with_bins(state, int(code), of_terms, own.ordinal)
        reference[code] = add_terms(reference[code], of_terms)
        added[code] = cells[places].sum(axis=0)
        turns[code, REFERENCE, :LEVEL] = add_terms(
            turns[code, REFERENCE, :LEVEL], _level_terms(own, session_before[places])
        )
    return replace(
        state,
        reference=reference,
        reference_since=since,
        blocks=blocks,
        profiles=with_reference_cells(state.profiles, added),
        turns=turns,
    )


def _terms(rows: Columns, session_before: Floats) -> Floats:
    named = rows.session != NO_SESSION
    return terms(rows.x, rows.log_length, rows.drafted, rows.accepted, session_before, named)


def _level_terms(rows: Columns, session_before: Floats) -> Floats:
    named = rows.session != NO_SESSION
    return level_terms(session_before[:, 0], named) if named.any() else np.zeros((len(rows), LEVEL))


def with_joining(state: StreamState, rows: Columns, session_before: Floats) -> Floats:
    """`joining` after these rows, none of which follows the end of a block; `session_before` [T, KNOWN]."""
    places = np.flatnonzero(_grows(state)[rows.stratum])
    if len(places) == 0:
        return state.joining
    own, joining = rows[places], state.joining.copy()
    before = session_before[places]
    added = np.hstack([_terms(own, before), cells_of(own), _level_terms(own, before)])
    np.add.at(joining[:, 1], own.stratum, added)  # one after the other, so that batching changes no bit
    return joining


def with_turns(state: StreamState, rows: Columns, session_before: Floats) -> Floats:
    """`turns` after these rows; `session_before` [T, KNOWN]."""
    named = np.flatnonzero(rows.session != NO_SESSION)
    if len(named) == 0:
        return state.turns
    own, turns = rows[named], state.turns.copy()
    added = turn_terms(session_before[named], own.x - own.effect, own.log_length)
    # What was before there is a baseline is of it. One after the other, so that batching changes no bit.
    np.add.at(turns, (own.stratum, np.where(state.ready[own.stratum], NEWEST, LEARNED)), added)
    return turns


def check_reference(
    config: DetectorConfig, before: StreamState, state: StreamState, batch: ObservationBatch, row: Columns
) -> tuple[StreamState, list[Finding]]:
    """Ends the reference period of the row's stratum, or lengthens it, when its size is reached.

    `before` is the state before the batch.
    """
    code = int(row.stratum[0])
    if state.ready[code]:
        return _grown(config, state, row, code)
    requests = state.reference[code, REQUESTS]
    if requests < state.reference_size[code]:
        return state, []
    why = state.why_learned(code)
    shift = shift_within(config, state, code)
    if shift is not None:
        before_fall = first_part(state, code, shift, row.ended_at(0))
        if before_fall is None:
            return begun_anew(state, code), []
        why = replace(why, before_fall=True)
        return _ready(config, before, state, before_fall, batch, row, why)
    state = _with(
        _with(state, "inflation", code, _inflation(state, code, row.ended_at(0))),
        "measured_at",
        code,
        int(requests),
    )
    if state.of_windows[code]:
        seen = counted(before, state, batch[: int(row.place[0]) + 1])
        runs = lifetime(seen.running_requests, seen.started_requests)
        learned, needed = _windows_learned(config, state, code, row.ended_at(0), runs)
    else:
        learned, needed = _requests_learned(config, state, code)
    if needed > requests:
        return _with(state, "reference_size", code, needed), []
    if state.of_windows[code] and (odd := _odd_start(config, state, code)):
        return _without_first(state, code, odd), []
    learned = begun(_with(learned, "ready_ordinal", code, row.ordinal[0]), code, int(row.ordinal[0]))
    return _ready(config, before, state, learned, batch, row, why)


def _ready(
    config: DetectorConfig,
    before: StreamState,
    state: StreamState,
    learned: StreamState,
    batch: ObservationBatch,
    row: Columns,
    why: WhyBegun,
) -> tuple[StreamState, list[Finding]]:
    """After the row that ends the reference period of its stratum; `state` has not `learned` from it yet."""
    code = int(row.stratum[0])
    is_first = not watched_segments(state)[state.segment_of_stratum[code]]
    learned = without_bins(learned, row.stratum)
    if not state.ready.any():
        seen = counted(before, state, batch[: int(row.place[0]) + 1])
        learned = replace(learned, requests_per_day=requests_per_day(seen), steady_since=row.ended_at(0))
    state = restart_bets(learned) if is_first else learned
    state = _with(state, "growing", code, _may_grow(config, state, row, code))
    finding = BaselineReady(
        **_baseline(config, state, code, row),
        why=why,
        since=float(state.reference_since[code]),
        standard_deviation=_level(config, state, code)[1],
        false_alarm_every=config.threshold(state.requests_per_day),
        variance_inflation=float(state.inflation[code]),
    )
    return state, [finding]


def _grown(
    config: DetectorConfig, state: StreamState, row: Columns, code: int
) -> tuple[StreamState, list[Finding]]:
    """After a row of a stratum whose reference period may grow."""
    if requests_until_joining(state)[code] > 0.0:
        return state, []
    waiting, newest = state.joining[code]
    joining = np.zeros_like(state.joining[code])
    if in_doubt(config, state, code):
        return _with(state, "joining", code, joining), []
    joining[0] = newest
    cells = np.zeros((len(state.reference), CELLS))
    cells[code] = waiting[SUMS:-LEVEL]
    turns = state.turns.copy()
    turns[code, REFERENCE, :LEVEL] += waiting[-LEVEL:]
    state = _with(state, "reference", code, state.reference[code] + waiting[:SUMS])
    state = replace(
        _with(state, "joining", code, joining),
        profiles=with_reference_cells(state.profiles, cells),
        turns=turns,
    )
    if _may_grow(config, state, row, code):
        return state, []
    state = _with(_with(state, "joining", code, 0.0), "growing", code, False)
    return state, [BaselineSettled(**_baseline(config, state, code, row))]


def _may_grow(config: DetectorConfig, state: StreamState, row: Columns, code: int) -> bool:
    if any(profile.used[code] for profile in state.profiles):
        return False
    _, _, margin = _level(config, state, code)
    return margin > config.ignore and row.ended_at(0) - state.reference_since[code] <= LONGEST_GROWTH_SECONDS


def _with(state: StreamState, column: str, code: int, value: Any) -> StreamState:
    changed = getattr(state, column).copy()
    changed[code] = value
    return replace(state, **{column: changed})


def _inflation(state: StreamState, code: int, now: float) -> float:
    """Of a reference period so far, at `now` in seconds since 1970."""
    sums = state.reference[code]
    if sessions_tell(sums):
        return 1.0
    requests, variance = int(sums[REQUESTS]), float(variance_of(sums))
    residuals = of_residuals(state.blocks[code], requests, *line_of(sums))
    caution = caution_of(state, code)
    longest = longest_block(state, code, now)
    means = BlockMeans.of(residuals, requests, variance, requests, caution, longest=longest)
    return inflation(means)


def _requests_learned(config: DetectorConfig, state: StreamState, code: int) -> tuple[StreamState, int]:
    """The state that knows what its bets cut off, and the size that the reference period needs."""
    needed = needed_requests(state.reference[code], config.minimum_drop)
    return _with(state, "cut_off", code, _cut_off(state, code)), needed


def _cut_off(state: StreamState, code: int) -> Floats:
    """b_j of the bets [LANES]: nothing is cut where other traffic pushed the requests out of the history."""
    own = _reference_rows(state, code)
    return cut_off(own.x) if len(own) >= FIRST_CHECK else NOT_CUT


def _windows_learned(
    config: DetectorConfig, state: StreamState, code: int, now: float, runs: float
) -> tuple[StreamState, int]:
    """The state that has learned from the windows of a reference period, and the size that it needs."""
    own, windows = _reference_rows(state, code), int(state.reference[code, REQUESTS])
    if len(own) < WINDOW_REFERENCE:  # other traffic pushed them out of the history
        return state, windows + WINDOW_REFERENCE
    state = _with(state, "windows", code, learn(own.x, own.drafted.astype(np.float64)))
    state = _with(state, "cut_off", code, NORMAL_CUT_OFF)
    usual = usual_windows_of(config, state, code)
    return state, needed_windows(windows, _inflation(state, code, now), runs, usual)


def _odd_start(config: DetectorConfig, state: StreamState, code: int) -> int:
    own = _reference_rows(state, code)
    if len(own) < state.reference[code, REQUESTS]:
        return 0
    return odd_start(own.x, LEAST_DROPS * config.minimum_drop)


def _without_first(state: StreamState, code: int, windows: int) -> StreamState:
    """The state whose reference period, of windows that are all in the history, has not counted the first."""
    rows = _reference_rows(state, code)[windows:]
    state = with_reference(begun_anew(state, code), rows, np.zeros((len(rows), KNOWN)))
    return _with(state, "reference_size", code, max(len(rows) + 1, WINDOW_REFERENCE))


def usual_windows_of(config: DetectorConfig, state: StreamState, code: int) -> int:
    """Of a stratum of windows whose reference period is under way; 0 where the history has one at most."""
    ended_at = _reference_rows(state, code).ended_ms / 1000.0
    if len(ended_at) < 2:
        return 0
    return usual_windows(state.reference[code], ended_at, config.minimum_drop)


def _reference_rows(state: StreamState, code: int) -> Columns:
    """The rows of a stratum's reference period, as far as the history still has them."""
    rows = history_rows(state)
    return rows[np.flatnonzero(rows.stratum == code)][-int(state.reference[code, REQUESTS]) :]


def _baseline(config: DetectorConfig, state: StreamState, code: int, row: Columns) -> dict[str, Any]:
    """The fields of StratumBaseline after this row."""
    mean, _, margin = _level(config, state, code)
    return {
        "segment": state.names[state.segment_of_stratum[code]],
        "stratum": str(state.setting_of(code)),
        "ordinal": int(row.ordinal[0]),
        "ended_at": row.ended_at(0),
        "requests": int(state.reference[code, REQUESTS]),
        "acceptance": baseline_of(state, code),
        "mean_per_request": mean,
        "fall_below": max(mean - margin, 0.0),
        "rise_above": min(mean + margin, 1.0),
    }


def _level(config: DetectorConfig, state: StreamState, code: int) -> tuple[float, float, float]:
    """(mean, standard deviation, margin) of a stratum at the mean length, or at typical traffic."""
    base = baselines(state.reference, state.inflation, state.measured_at, state.of_windows)
    errors, unseen = base.error_factor * base.mean_error, unseen_of(state, base)
    margin = margin_of(errors, unseen, config.ignore, state.of_windows)
    return float(base.mean[code]), float(np.sqrt(base.variance[code])), float(margin[code])
