"""Blocks of requests as observations, in strata where neighbours are alike (`autocorrelation.py`).

The last request of a block carries its evidence: the mean x of the block against the mean of what its
requests should accept, less the mean of their margins. The others hold no evidence (fresh is 0, so the
stake is 0 and e is 1). A request that holds no evidence of its own is in no block.

The mean of a block is taken to be normal: NORMAL_CUT_OFF of `bets.py` is what its bets cut off.

Assumption: E[mean of a block | earlier blocks] is at least the mean of its requests' safe baselines: the
likeness reaches into the next block to a negligible part only. It always reaches a little, so that the
guarantee of `evidence.py` is approximate here. Likeness across strata is not seen.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.state.columns import Columns
from driftguard.detection.state.stream_state import StreamState
from driftguard.detection.statistics.baseline import Baselines
from driftguard.detection.statistics.bets import DOWN, UP, Offers, offers, stakes
from driftguard.detection.steps.expectation import change_shown, request_variance

Floats = NDArray[np.float64]


def offers_against(
    state: StreamState, base: Baselines, rows: Columns, boundary: Floats, *, rise: bool
) -> Offers:
    """What these rows offer to bet on: x below `boundary` [T] (above, for a rise)."""
    cut = state.cut_off[rows.stratum, (UP if rise else DOWN)]
    variance = request_variance(base.within[rows.stratum], base.between[rows.stratum], rows.fresh)
    return offers(rows.x, boundary, variance, rise=rise, cut=cut)


def bets_against(
    state: StreamState, base: Baselines, rows: Columns, boundary: Floats, *, rise: bool
) -> Floats:
    """e [T, BETS] of the same, on a change at any time."""
    shown = change_shown(base.within[rows.stratum], base.between[rows.stratum], rows.fresh)
    return offers_against(state, base, rows, boundary, rise=rise).factors(stakes(shown))


def in_blocks(state: StreamState, rows: Columns) -> tuple[Columns, Floats]:
    """Rows that follow the state as they are bet on, and the blocks open after them [C, OPEN_BLOCK]."""
    blocked = _blocked(state, rows)
    if len(blocked) == 0:
        return rows, state.open_block
    columns, after = _bet_columns(rows), state.open_block.copy()
    requests = np.vstack([np.ones(len(rows)), columns[:3]]).T  # [T, OPEN_BLOCK]
    for code in blocked:
        own, size, waiting = _evident(rows, code), int(state.blocks[code, 0]), int(after[code, 0])
        filled = np.zeros((-(-(waiting + len(own)) // size) * size, requests.shape[1]))
        filled[:1] = after[code]
        filled[waiting : waiting + len(own)] = requests[own]
        # accumulate adds one by one, so that a sum is the same however its requests were batched
        sums = np.add.accumulate(filled.reshape(-1, size, requests.shape[1]), axis=1)[:, -1]
        ends = own[size - 1 - waiting :: size]
        after[code] = sums[-1] if len(sums) > len(ends) else 0.0
        columns[3, rows.stratum == code] = 0.0
        columns[:3, ends] = sums[: len(ends), 1:].T / size
        columns[3, ends] = 1.0
    return _with(rows, columns), after


def in_past_blocks(state: StreamState, rows: Columns) -> Columns:
    """The history's rows as they were bet on; a block that it holds only in part counts as no evidence."""
    blocked = _blocked(state, rows)
    if len(blocked) == 0:
        return rows
    columns = _bet_columns(rows)
    for code in blocked:
        own, size = _evident(rows, code), int(state.blocks[code, 0])
        own = own[rows.ordinal[own] > state.ready_ordinal[code]]
        last = len(own) - int(state.open_block[code, 0])
        of_block = own[last % size : max(last, 0)].reshape(-1, size)
        columns[3, rows.stratum == code] = 0.0
        columns[:3, of_block[:, -1]] = columns[:3, of_block].mean(axis=2)
        columns[3, of_block[:, -1]] = 1.0
    return _with(rows, columns)


def _blocked(state: StreamState, rows: Columns) -> NDArray[np.uint16]:
    """The strata of the rows that have blocks."""
    return np.unique(rows.stratum[state.blocks[rows.stratum, 0] > 0.0])


def _evident(rows: Columns, code: int) -> NDArray[np.intp]:
    return np.flatnonzero((rows.stratum == code) & (rows.fresh > 0.0))


def _bet_columns(rows: Columns) -> Floats:
    return np.stack([rows.x, rows.expected, rows.margin, rows.fresh])


def _with(rows: Columns, columns: Floats) -> Columns:
    x, expected, margin, fresh = columns
    return replace(rows, x=x, expected=expected, margin=margin, fresh=fresh)
