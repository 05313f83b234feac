"""A change while a reference period is under way: its baseline must not be a mixture of before and after.

Whenever the size of a reference period is checked (two to five times) it is asked whether the mean per
request shifted within it, by at least LEAST_DROPS x `minimum_drop`. After a fall the baseline is that of the
part before, and what came after is judged against that: the alarm follows in the usual way. After a rise, or
where the part before is smaller than LEAST_FIRST, the reference period begins anew: a baseline below the
level that there is now would hide a later fall.

Windows of a counter are not asked: their reference period is a few minutes, and tasks that wander shift it.
Neither are requests whose K is chosen by the load, which shifts their mean too (`strata.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.config import DetectorConfig
from driftguard.detection.state.columns import Columns
from driftguard.detection.state.stream_state import Floats, Ints, StreamState
from driftguard.detection.statistics.baseline import (
    FIRST_CHECK,
    REQUESTS,
    SUMS,
    Baselines,
    add_terms,
    variance_of,
)
from driftguard.detection.statistics.bets import NOT_CUT
from driftguard.detection.statistics.level_shift import (
    LevelShift,
    add_to_bins,
    bin_size,
    find,
)
from driftguard.detection.statistics.long_run_variance import (
    OF_BLOCKS,
    OF_REQUESTS,
    SCALES,
    BlockMeans,
    add_to_blocks,
    inflation,
)
from driftguard.detection.statistics.sessions import OpenSessions
from driftguard.detection.statistics.turns import LEARNED, REFERENCE
from driftguard.detection.steps.dependence import longest_block
from driftguard.detection.steps.expectation import effect_of_time, margin_of, unseen_of

LEAST_DROPS = 2.0  # users that wander slowly move by one of them within a reference period
LEAST_FIRST = 48  # requests before a fall, for a baseline of these alone


def with_bins(state: StreamState, code: int, added: Floats, ordinals: Ints) -> StreamState:
    """The state whose stratum has put these requests, [T, SUMS] terms, into the bins of its reference period.

    Called before its reference has counted them.
    """
    if state.of_windows[code]:
        return state
    if code not in state.learning:
        place = int(np.searchsorted(state.learning, code))  # in one order, in whichever batch they begin
        state = replace(
            state,
            learning=np.insert(state.learning, place, code),
            bins=np.insert(state.bins, place, 0.0, axis=0),
        )
    own, bins = int(np.flatnonzero(state.learning == code)[0]), state.bins.copy()
    bins[own] = add_to_bins(
        bins[own], int(state.reference[code, REQUESTS]), added, ordinals.astype(np.float64)
    )
    return replace(state, bins=bins)


def without_bins(state: StreamState, codes: NDArray[np.integer[Any]]) -> StreamState:
    """The state in which these strata are no longer asked, or begin anew."""
    others = ~np.isin(state.learning, codes)
    return replace(state, learning=state.learning[others], bins=state.bins[others])


def shift_within(config: DetectorConfig, state: StreamState, code: int) -> LevelShift | None:
    """Of a stratum whose reference period is under way: by how much its mean moved, where that matters."""
    if code not in state.learning or state.selection[code] > 0.0:
        return None
    own, requests = int(np.flatnonzero(state.learning == code)[0]), int(state.reference[code, REQUESTS])
    shift = find(state.bins[own], requests)
    if shift is None:
        return None
    return shift if abs(shift.gap) >= LEAST_DROPS * config.minimum_drop else None


def first_part(state: StreamState, code: int, shift: LevelShift, now: float) -> StreamState | None:
    """The state whose stratum has the baseline of the part before a fall, and is ready from there on. None
    where there is no such part, or it rose. `now`: end of the newest request, in seconds since 1970."""
    own = int(np.flatnonzero(state.learning == code)[0])
    before = state.bins[own, : shift.bin - 1]
    sums = add_terms(np.zeros(SUMS), before[:, :SUMS])
    if shift.gap > 0.0 or sums[REQUESTS] < LEAST_FIRST:
        return None
    requests = int(state.reference[code, REQUESTS])
    size = bin_size(requests)
    blocks = _blocks(shift.residuals, size, float(variance_of(sums)))
    counted = len(shift.residuals) * size
    of_code = np.arange(len(state.ready)) == code
    share = np.where(of_code, sums[REQUESTS] / requests, 1.0)[:, None]
    means = BlockMeans.of(
        blocks,
        counted,
        float(variance_of(sums)),
        counted,
        OF_REQUESTS,
        longest=longest_block(state, code, now),
    )
    turns = state.turns.copy()
    turns[code, REFERENCE] *= share[code]
    turns[code, LEARNED:] = 0.0  # a session that the fall has met looks like one that wanders
    found = inflation(means)
    return replace(
        state,
        reference=np.where(of_code[:, None], sums, state.reference),
        ready_ordinal=np.where(of_code, int(before[-1, SUMS]), state.ready_ordinal),
        cut_off=np.where(of_code[:, None], NOT_CUT, state.cut_off),
        blocks=np.where(of_code[:, None, None], blocks, state.blocks),
        counted=np.where(of_code, counted, state.counted),
        counted_until=np.where(of_code, state.ordinal, state.counted_until),
        inflation=np.where(of_code, found, state.inflation),
        measured_at=np.where(of_code, requests, state.measured_at),
        profiles=tuple(replace(profile, reference=share * profile.reference) for profile in state.profiles),
        turns=turns,
    )


def _blocks(residuals: Floats, size: int, variance: float) -> Floats:
    """The sums of `long_run_variance.py` from those of bins of so many requests. What is shorter than a bin
    is taken to be independent."""
    scale = size.bit_length() - 1
    blocks = np.zeros((SCALES, OF_BLOCKS))
    blocks[:scale, 0] = len(residuals) * size * variance
    of_bins = add_to_blocks(np.zeros((SCALES, OF_BLOCKS)), 0, residuals, np.zeros_like(residuals))
    blocks[scale:] = of_bins[: SCALES - scale]
    return blocks


def begun_anew(state: StreamState, code: int) -> StreamState:
    """The state whose stratum begins its reference period with its next request."""
    own = np.arange(len(state.ready)) == code
    return replace(
        without_bins(state, np.array([code])),
        reference=np.where(own[:, None], 0.0, state.reference),
        reference_size=np.where(own, FIRST_CHECK, state.reference_size),
        blocks=np.where(own[:, None, None], 0.0, state.blocks),
        inflation=np.where(own, 1.0, state.inflation),
        measured_at=np.where(own, 0, state.measured_at),
        profiles=tuple(profile.without(own) for profile in state.profiles),
        turns=np.where(own[:, None, None], 0.0, state.turns),
        sessions=OpenSessions.empty(),
    )


def with_rest_judged(state: StreamState, base: Baselines, ignore: float, rows: Columns) -> Columns:
    """The rows of a history in which what came after the first part of a reference period is held against
    that, as the first requests of sessions of mean length: they say since when acceptance has changed."""
    rest = state.ready[rows.stratum] & (rows.ordinal > state.ready_ordinal[rows.stratum])
    rest &= (rows.expected == 0.0) & (rows.fresh == 0.0)
    if not rest.any():
        return rows
    margin = margin_of(base.error_factor * base.mean_error, unseen_of(state, base), ignore, state.of_windows)
    expected = np.clip(base.mean[rows.stratum] + effect_of_time(state, rows), 0.0, 1.0)
    return replace(
        rows,
        expected=np.where(rest, expected, rows.expected),
        margin=np.where(rest, margin[rows.stratum], rows.margin),
        fresh=np.where(rest, 1.0, rows.fresh),
    )
