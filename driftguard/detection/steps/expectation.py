"""What each request should accept if nothing changed, and how far below (above) that is no change."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from driftguard.detection.state.columns import Columns, Floats
from driftguard.detection.state.stream_state import StreamState
from driftguard.detection.statistics.baseline import Baselines
from driftguard.detection.statistics.bets import SMALLEST_VARIANCE
from driftguard.detection.statistics.windows import window_margin

LARGEST_LENGTH_ERROR = 0.1  # beyond it too little is known about such lengths to bet on


def predicted(
    state: StreamState, base: Baselines, ignore: float, rows: Columns, session_before: Floats
) -> Columns:
    """The rows with what the bets are made against; those of strata without a baseline unchanged (0).

    Formula: the line expects b = mean + slope (l - middle) + the effect of the hour of day, and safe is
    m = b - k, k = max(2 se, ignore), se^2 = mean_error^2 + (slope_error (l - middle))^2 + the variance of
    that effect (`hourly_profile.py`; 0 until one is used). After n earlier requests of the session, whose x
    lay d above the line on average, the request is expected to accept expected = b + w d and at least
    m + w (b + d - m) = expected - fresh k (= `margin`), with w = n / (n + kappa), kappa = within /
    between, fresh = 1 - w: the best linear prediction from a session's own mean. Upward mirrored.
    fresh is also the part of a lasting change that the request shows, and 0 marks requests that hold no
    evidence: no baseline yet, or a length so far from those of the reference period that the line says
    nothing.
    Assumptions: sessions differ by Gaussian random effects with the estimated variances; the shrunken
    mean is then exactly the predictive mean E[x | past]. For other distributions it is the best linear
    predictor: right on average over sessions, not in every session, and the guarantee approximate.
    Nothing is assumed about the order in which sessions interleave. A session that spans strata counts
    in each by itself.
    Guarantee: the false-alarm guarantee is conditional on the true mean lying above the safe baseline,
    which fails in about 2% of strata when 2 se decides; a mean that lies a further standard error
    below it still loses most bets, because each pays for its own variance.
    """
    own, watched = rows.stratum, state.ready[rows.stratum]
    length_error = base.slope_error[own] * np.abs(rows.log_length - base.middle[own])
    hour_variance = _hour_variance(state, rows)
    error = np.sqrt(base.mean_error[own] ** 2 + length_error**2 + hour_variance)
    margin = np.clip(base.error_factor[own] * error, ignore, 1.0)
    session, fresh = _session_effect(base, rows, session_before)
    expected = np.clip(line(state, base, rows) + rows.rhythm + session, 0.0, 1.0)
    told = watched & (2.0 * length_error <= LARGEST_LENGTH_ERROR)
    rows = replace(
        rows,
        expected=np.where(watched, expected, 0.0),
        margin=np.where(watched, fresh * margin, 0.0),
        fresh=np.where(told, fresh, 0.0),
        open_for=session_before[:, 3],
    )
    return _windows_predicted(state, ignore, rows, hour_variance)


def line(state: StreamState, base: Baselines, rows: Columns) -> Floats:
    """What the rows [T] should accept by the reference period alone: at their length, at any hour."""
    own = rows.stratum
    expected = base.mean[own] + base.slope[own] * (rows.log_length - base.middle[own])
    windows = np.flatnonzero(state.of_windows[own])
    expected[windows] = state.windows[own[windows], 0]
    return expected


def _hour_variance(state: StreamState, rows: Columns) -> Floats:
    if not state.rhythms.used.any():
        return np.zeros(len(rows))
    return state.rhythms.variance[rows.stratum, rows.hour]


def _windows_predicted(state: StreamState, ignore: float, rows: Columns, hour_variance: Floats) -> Columns:
    """The rows with the windows among them predicted as windows."""
    places = np.flatnonzero(state.of_windows[rows.stratum] & state.ready[rows.stratum])
    if len(places) == 0:
        return rows
    learned, drafted = state.windows[rows.stratum[places]], rows.drafted[places].astype(np.float64)
    expected, margin, fresh = rows.expected.copy(), rows.margin.copy(), rows.fresh.copy()
    expected[places] = np.clip(learned[:, 0] + rows.rhythm[places], 0.0, 1.0)
    of_hours = 2.0 * np.sqrt(hour_variance[places])
    margin[places] = np.minimum(np.hypot(window_margin(learned, drafted, ignore), of_hours), 1.0)
    fresh[places] = 1.0
    return replace(rows, expected=expected, margin=margin, fresh=fresh)


def _session_effect(base: Baselines, rows: Columns, before: Floats) -> tuple[Floats, Floats]:
    """(w d, 1 - w) of each request, from its session before it [T, KNOWN]."""
    own, n = rows.stratum, before[:, 0]
    line = base.mean[own] * n + base.slope[own] * (before[:, 2] - n * base.middle[own])
    weight = n * base.between[own]
    total = np.maximum(weight + base.within[own], SMALLEST_VARIANCE)
    effect = base.between[own] / total * (before[:, 1] - line)
    return effect, 1.0 - weight / total


def request_variance(within: Floats, between: Floats, fresh: Floats) -> Floats:
    """Variance of x given the past [T]: what is left of the session's, and the request's own."""
    return np.maximum(within + between * fresh, SMALLEST_VARIANCE)


def change_shown(within: Floats, between: Floats, fresh: Floats) -> Floats:
    """How much of a lasting change each request shows [T], in its standard deviations, against the first of
    a session."""
    part: Floats = fresh * deviations_of_first(within, between, fresh)
    return part


def deviations_of_first(within: Floats, between: Floats, fresh: Floats) -> Floats:
    """The standard deviation of the first request of a session in those of each request [T]."""
    of_first = request_variance(within, between, np.ones_like(fresh))
    deviations: Floats = np.sqrt(of_first / request_variance(within, between, fresh))
    return deviations


def safe_baseline(rows: Columns, *, rise: bool) -> Floats:
    """What the null says: the mean of x given the past is at least this (a rise: at most)."""
    sign = 1.0 if rise else -1.0
    return np.clip(rows.expected + sign * rows.margin, 0.0, 1.0)
