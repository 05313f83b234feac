"""What requests would have accepted at the baselines of their strata, in their own mix."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from driftguard.detection.state.columns import Columns
from driftguard.detection.state.stream_state import StreamState
from driftguard.detection.statistics.acceptance import acceptance_of
from driftguard.detection.statistics.baseline import reference_acceptance
from driftguard.records.documents.acceptance import Acceptance
from driftguard.records.positions import combined


def acceptance_over(state: StreamState, rows: Columns) -> Acceptance:
    """Of n >= 1 rows; where requests are among them, their interval is the wider one of requests."""
    windows = bool(state.of_windows[rows.stratum].all())
    positions = combined(state.positions_of(code) for code in np.unique(rows.stratum).tolist())
    return acceptance_of(rows.drafted, rows.accepted, of_windows=windows, positions=positions)


def baseline_of(state: StreamState, code: int) -> Acceptance:
    """Of one stratum's reference period."""
    return reference_acceptance(
        state.reference[code],
        of_windows=bool(state.of_windows[code]),
        positions=state.positions_of(code),
    )


def at_baseline(state: StreamState, rows: Columns) -> Acceptance:
    """Of rows of strata with a baseline: the strata's acceptance in the mix of the rows' drafted tokens
    and at their hours of day.

    A plain mean over earlier traffic would move with the mix alone. The interval adds the squared
    half widths of the strata's intervals, weighted by their shares squared.
    """
    drafted = np.bincount(rows.stratum, weights=rows.drafted.astype(np.float64))
    strata = [int(code) for code in np.unique(rows.stratum)]
    effect = state.rhythms.effect[rows.stratum, rows.hour]
    of_hours = float((effect * rows.drafted).sum()) / float(drafted.sum())
    parts = [baseline_of(state, code) for code in strata]
    shares = [float(drafted[code] / drafted.sum()) for code in strata]
    rate = sum(share * part.rate for share, part in zip(shares, parts, strict=True))
    squares = [(share * (part.high - part.low) / 2.0) ** 2 for share, part in zip(shares, parts, strict=True)]
    half = math.sqrt(sum(squares))
    if len(parts) == 1:
        return _moved(parts[0], of_hours)
    low, high = max(rate - half, 0.0), min(rate + half, 1.0)
    requests = sum(part.requests for part in parts)
    positions = combined(part.positions for part in parts)
    return _moved(Acceptance(min(rate, 1.0), low, high, requests, positions), of_hours)


def _moved(acceptance: Acceptance, by: float) -> Acceptance:
    rate, low, high = (
        min(max(value + by, 0.0), 1.0) for value in (acceptance.rate, acceptance.low, acceptance.high)
    )
    return replace(acceptance, rate=rate, low=low, high=high)
