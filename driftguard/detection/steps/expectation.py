"""What requests should accept if nothing changed: each by itself, with how far below (or above) is no change;
and many together, in their own mix.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.state.columns import Columns, Floats
from driftguard.detection.state.stream_state import StreamState
from driftguard.detection.statistics.baseline import Baselines, acceptance_of, reference_acceptance
from driftguard.detection.statistics.bets import SMALLEST_VARIANCE
from driftguard.detection.statistics.factors import FACTORS, OF_TIME, Factor, Profile
from driftguard.detection.statistics.sessions import NO_SESSION
from driftguard.detection.statistics.turns import Turns
from driftguard.detection.statistics.windows import MARGIN_ERRORS, SMALLEST_MARGIN
from driftguard.records.documents.acceptance import Acceptance
from driftguard.records.positions import combined

LARGEST_LENGTH_ERROR = 0.1  # beyond it too little is known about such lengths to bet on


def predicted(
    state: StreamState, base: Baselines, ignore: float, rows: Columns, session_before: Floats
) -> Columns:
    """The rows with what the bets are made against; those of strata without a baseline unchanged (0).

    Formula: the line expects b = mean + slope (l - middle) + the effects of the factors in use, and safe is
    m = b - k, k = max(2 se, ignore), se^2 = mean_error^2 + (slope_error (l - middle))^2 + the variance of
    those effects (`factors.py`; 0 until one is used); k of windows is wider (`margin_of`). After n
    earlier requests of the session, whose x lay d above the line on average, the request is expected to
    accept expected = b + w d and at least
    m + w (b + d - m) = expected - fresh k (= `margin`), with w = n / (n + kappa), kappa = within /
    between, fresh = 1 - w: the best linear prediction from a session's own mean. Upward mirrored.
    Where acceptance follows the turn n, that is part of b and of d, and what is not known of it part of the
    margin: two standard errors of it, in quadrature (`turns.py`).
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
    variance = _of_factors(state, rows, "variance", FACTORS)
    error = np.sqrt(base.mean_error[own] ** 2 + length_error**2 + variance)
    errors, unseen = base.error_factor[own] * error, unseen_of(state, base)[own]
    margin = margin_of(errors, unseen, ignore, state.of_windows[own])
    session, fresh = _session_effect(base, rows, session_before)
    of_turn, turn_error = _turn_effect(state, base, rows, session_before, 1.0 - fresh)
    expected = np.clip(line(base, rows) + rows.effect + session + of_turn, 0.0, 1.0)
    told = watched & (2.0 * length_error <= LARGEST_LENGTH_ERROR)
    return replace(
        rows,
        expected=np.where(watched, expected, 0.0),
        margin=np.where(watched, np.hypot(fresh * margin, 2.0 * turn_error), 0.0),
        fresh=np.where(told, fresh, 0.0),
        open_for=session_before[:, 3],
    )


def unseen_of(state: StreamState, base: Baselines) -> Floats:
    """How far each stratum's mean may move that has not been seen to [C], or because of what K selects."""
    return np.asarray(base.unseen + state.selection * np.sqrt(base.within + base.between))


def margin_of(errors: Floats, unseen: Floats, ignore: float, of_windows: NDArray[np.bool_]) -> Floats:
    """How far below (or above) what is expected is no change [T], from two standard errors [T] and what has
    not been seen [T] of how the mean wanders."""
    of_window = np.maximum(MARGIN_ERRORS * errors, SMALLEST_MARGIN)
    return np.clip(np.where(of_windows, of_window, errors) + unseen, ignore, 1.0)


def with_margins(state: StreamState, base: Baselines, ignore: float, rows: Columns) -> Columns:
    """The rows of a history with margins that are at least what these baselines ask for."""
    own, watched = rows.stratum, state.ready[rows.stratum]
    least = margin_of(base.error_factor * base.mean_error, unseen_of(state, base), ignore, state.of_windows)
    return replace(rows, margin=np.where(watched, np.maximum(rows.margin, rows.fresh * least[own]), 0.0))


def line(base: Baselines, rows: Columns) -> Floats:
    """What the rows [T] should accept by the reference period alone: at their length, at any time."""
    own = rows.stratum
    return np.asarray(base.mean[own] + base.slope[own] * (rows.log_length - base.middle[own]))


def effect_of_time(state: StreamState, rows: Columns) -> Floats:
    """What hour and weekday add to the line [T], of rows of a history, too; 0 where they are not used."""
    return _of_factors(state, rows, "effect", OF_TIME)


def effect_of_factors(state: StreamState, rows: Columns) -> Floats:
    """What all factors add to the line [T]; 0 where none is used."""
    return _of_factors(state, rows, "effect", FACTORS)


def effect_of(
    profile: Profile, factor: Factor, rows: Columns, name: Literal["effect", "variance"] = "effect"
) -> Floats:
    """Of one factor [T], or the variance of it."""
    if not profile.used.any():
        return np.zeros(len(rows))
    values: Floats = getattr(profile, name)[rows.stratum, factor.cell(rows)]
    return values


def _of_factors(
    state: StreamState, rows: Columns, name: Literal["effect", "variance"], factors: Sequence[Factor]
) -> Floats:
    total = np.zeros(len(rows))
    for factor, profile in zip(factors, state.profiles, strict=False):
        total = total + effect_of(profile, factor, rows, name)
    return total


def _session_effect(base: Baselines, rows: Columns, before: Floats) -> tuple[Floats, Floats]:
    """(w d, 1 - w) of each request, from its session before it [T, KNOWN]."""
    own, n = rows.stratum, before[:, 0]
    line = base.mean[own] * n + base.slope[own] * (before[:, 2] - n * base.middle[own])
    weight = n * base.between[own]
    total = np.maximum(weight + base.within[own], SMALLEST_VARIANCE)
    effect = base.between[own] / total * (before[:, 1] - line)
    return effect, 1.0 - weight / total


def _turn_effect(
    state: StreamState, base: Baselines, rows: Columns, before: Floats, weight: Floats
) -> tuple[Floats, Floats]:
    """What the turn of each request adds, and the error of that [T]; 0 of requests without a session."""
    effect, error = np.zeros(len(rows)), np.zeros(len(rows))
    named = np.flatnonzero(rows.session != NO_SESSION)
    if len(named):
        strata, own = np.unique(rows.stratum[named], return_inverse=True)
        turns = Turns.of(state.turns[strata], base.within[strata], base.slope[strata])
        effect[named], error[named] = turns.effect(own, before[named], weight[named])
    return effect, error


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


def acceptance_over(state: StreamState, rows: Columns) -> Acceptance:
    """Of n >= 1 rows; where requests are among them, their interval is the wider one of requests."""
    windows = bool(state.of_windows[rows.stratum].all())
    positions = combined([state.positions_of(code) for code in np.unique(rows.stratum).tolist()])
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
    and at their hours and weekdays.

    A plain mean over earlier traffic would move with the mix alone. The interval adds the squared
    half widths of the strata's intervals, weighted by their shares squared.
    """
    drafted = np.bincount(rows.stratum, weights=rows.drafted.astype(np.float64))
    strata = [int(code) for code in np.unique(rows.stratum)]
    of_time = float((effect_of_time(state, rows) * rows.drafted).sum()) / float(drafted.sum())
    parts = [baseline_of(state, code) for code in strata]
    shares = [float(drafted[code] / drafted.sum()) for code in strata]
    rate = sum(share * part.rate for share, part in zip(shares, parts, strict=True))
    squares = [(share * (part.high - part.low) / 2.0) ** 2 for share, part in zip(shares, parts, strict=True)]
    half = math.sqrt(sum(squares))
    if len(parts) == 1:
        return _moved(parts[0], of_time)
    low, high = max(rate - half, 0.0), min(rate + half, 1.0)
    requests = sum(part.requests for part in parts)
    positions = combined([part.positions for part in parts])
    return _moved(Acceptance(min(rate, 1.0), low, high, requests, positions), of_time)


def _moved(acceptance: Acceptance, by: float) -> Acceptance:
    rate, low, high = (
        min(max(value + by, 0.0), 1.0) for value in (acceptance.rate, acceptance.low, acceptance.high)
    )
    return replace(acceptance, rate=rate, low=low, high=high)
