"""What each request should accept if nothing changed, and how far below (above) that is no change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from driftguard.detection.baseline import Baselines
from driftguard.detection.columns import Columns, Floats
from driftguard.detection.state import StreamState

LARGEST_LENGTH_ERROR = 0.1  # beyond it too little is known about such lengths to bet on


def predicted(state: StreamState, base: Baselines, ignore: float, rows: Columns) -> Columns:
    """The rows with what the bets are made against; those of strata without a baseline unchanged (0).

    Formula: expected = mean + slope (l - middle); margin = max(2 se, ignore), se^2 = mean_error^2 +
    (slope_error (l - middle))^2. The safe baseline of a fall is expected - margin, upward mirrored.
    fresh = 0 marks requests that hold no evidence: no baseline yet, or a length so far from those of
    the reference period that the line says nothing.
    Guarantee: the false-alarm guarantee is conditional on the true mean lying above the safe baseline,
    which fails in about 2% of strata when 2 se decides; a mean that lies a further standard error
    below it still loses most bets, because each pays for its own variance.
    """
    own, watched = rows.stratum, state.ready[rows.stratum]
    distance = rows.log_length - base.middle[own]
    length_error = base.slope_error[own] * np.abs(distance)
    error = np.sqrt(base.mean_error[own] ** 2 + length_error**2)
    expected = np.clip(base.mean[own] + base.slope[own] * distance, 0.0, 1.0)
    return replace(
        rows,
        expected=np.where(watched, expected, 0.0),
        margin=np.where(watched, np.maximum(2.0 * error, ignore), 0.0),
        fresh=np.where(watched & (2.0 * length_error <= LARGEST_LENGTH_ERROR), 1.0, 0.0),
    )


def safe_baseline(rows: Columns, *, rise: bool) -> Floats:
    """What the null says: the mean of x given the past is at least this (a rise: at most)."""
    sign = 1.0 if rise else -1.0
    return np.clip(rows.expected + sign * rows.margin, 0.0, 1.0)
