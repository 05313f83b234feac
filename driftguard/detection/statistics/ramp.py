"""Did it change at once, or gradually? A change that is linear in time, beside the step of `change_point.py`.

Linear in time and not in requests: what makes acceptance fall bit by bit (topics that move, a server that
ages) goes on while nobody asks, overnight too, and a rate per day is what can be extrapolated.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.statistics.bets import Floats

PLACES = 96  # rows that are tried as the onset and as the end, denser towards the newest
EVENLY = 48  # more of them, evenly over the rows, and as many over time
BEYOND = 24  # before the first row
MARGIN = 1.5  # by which the log likelihood of a ramp that goes on exceeds that of every step: then it is one
MARGIN_OVER = 4.0  # that of a ramp that is over, which has one parameter more,
OVER = 2.0  # and by which it exceeds that of every ramp that goes on
IN_STEPS = 3.0  # by which it must not fall short of two steps, which have one or two parameters more
INTERVAL_DROP = 4.0  # of the profile log likelihood within the interval
CLOCK_ROWS = 9  # a clock is the median over so many rows
SMALLEST = 1e-12
SMALLEST_ERROR = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Moves:
    """T rows in order of arrival, of C strata."""

    seconds: Floats  # [T] that never go back: `steady_clock`
    residual: Floats  # [T] x less what was expected of it
    shown: Floats  # [T] part of a change that the row shows, above 0
    variance: Floats  # [T] of x, inflated
    stratum: NDArray[np.intp]  # [T] below C
    level_error: Floats  # [C] standard error of the level
    of_windows: NDArray[np.bool_] | None = None  # [T] a change at once may lie within the row; None: in none


@dataclass(frozen=True, slots=True)
class Ramp:
    """Level until `onset`, linear from there to `end`, and level again. Times in the seconds of the rows."""

    onset: float
    first: float  # interval of the onset
    last: float
    end: float  # the last row where it goes on
    moved: float  # from the onset to the end, in acceptance; below 0 for a fall
    gain: float  # of log likelihood over the best step
    over: bool  # it ended before the last row; then it is certain
    in_steps: bool  # two steps the same way explain as much

    @property
    def certain(self) -> bool:
        return self.over or (self.gain > MARGIN and not self.in_steps)


def steady_clock(seconds: Floats) -> Floats:
    """[T >= 1] times that never go back, without single ones that are far off: a running median, then the
    latest so far."""
    half = CLOCK_ROWS // 2
    padded = np.pad(seconds, half, mode="edge")
    median = np.median(np.lib.stride_tricks.sliding_window_view(padded, CLOCK_ROWS), axis=1)
    return np.asarray(np.maximum.accumulate(median))


def fit(rows: Moves, since: float, *, rise: bool) -> Ramp | None:
    """The ramp of a fall (or rise) in T >= 1 rows up to an alarm, or later.

    None where all were at one moment, or nothing moved that way. `since`: seconds, the earliest onset; before
    the first row where the history is shorter.

    Formula: residual_t = shown_t (a_c + b g_t) + noise of variance_t, with a level a_c of each stratum,
    normal with mean 0 and standard deviation level_error_c, and g_t = (t - onset) / (end - onset), not below
    0 and not above 1; b by generalised least squares. With w_t = shown_t^2 / variance_t and <u, v> =
    sum w_t u_t v_t - sum over c of u_c v_c / (W_c + 1 / level_error_c^2), where u_c is the sum of w_t u_t
    over the stratum and W_c that of w_t, the log likelihood grows by <r, g>^2 / (2 <g, g>), r = residual /
    shown. g is a difference of two hinges (t - onset)+, whose products are sums from a row on, so that all
    onsets and ends [P, P] are tried without a row of each.
    The ramp is the best one with end = the last row. It is `certain` where that beats the best step at any
    row by MARGIN; neither has more parameters. A window shows any part of a step that falls within it, so
    such a step counts among them too. Where one with an earlier end beats the best step by
    MARGIN_OVER, and every ramp that goes on by OVER, it is that one, and over. Neither is said where two
    steps the same way explain more, by IN_STEPS: a fall, and then a further one. The interval of the onset is
    of the likelihood profiled over the end in any case; it holds a step too, whose end is next to its onset.
    Where the history does not reach back to the onset, the line is continued to the level.
    Assumptions: one change since `since`, linear in time until it ends.
    Guarantee: none proved. An alarm comes when a fall looks steep, and at a step the profile is not
    regular, so that INTERVAL_DROP is twice the 1.92 of a chi-squared of 95%. Measured: docs/detection.md,
    tests/benchmarks/bench_ramps.py.
    Papers: Hinkley 1971 (two-phase regression); Muggeo 2003 (break points).
    """
    start, now = float(rows.seconds[0]), float(rows.seconds[-1])
    if now <= start:
        return None
    span = now - start
    time = (rows.seconds - now) / span  # [T] in [-1, 0]
    places = _places(time, (min(since, start) - now) / span)
    products, sign = _Products.of(rows), 1.0 if rise else -1.0
    gains, heights = _ramps(products, time, places, sign)
    going_on = int(gains[:, -1].argmax())
    if gains[going_on, -1] <= 0.0:
        return None
    step, two_steps = _best_step(products, sign), _best_two_steps(products, time, places, sign)
    if rows.of_windows is not None and rows.of_windows.any():
        step = max(step, _best_step_within(products, rows.of_windows, sign))
    begin, end = np.unravel_index(gains.argmax(), gains.shape)
    over = bool(gains[begin, end] > max(step + MARGIN_OVER, gains[going_on, -1] + OVER, two_steps - IN_STEPS))
    if not over:
        begin, end = np.intp(going_on), np.intp(len(places) - 1)
    profile = gains.max(axis=1)
    held = np.flatnonzero(profile >= profile.max() - INTERVAL_DROP)
    first, last = places[max(held[0] - 1, 0)], places[min(held[-1] + 1, len(places) - 1)]
    return Ramp(
        onset=now + span * float(np.clip(places[begin], first, last)),
        first=now + span * float(first),
        last=now + span * float(last),
        end=now + span * float(places[end]),
        moved=float(heights[begin, end]),
        gain=float(gains[begin, end]) - step,
        over=over,
        in_steps=bool(gains[begin, end] <= two_steps - IN_STEPS),
    )


def _places(time: Floats, earliest: float) -> Floats:
    """[P] of `time` [T] and before it, ascending; the last is 0."""
    rows = len(time)
    back = np.concatenate([np.geomspace(1, rows, PLACES), np.linspace(1, rows, EVENLY)]).astype(np.intp)
    inside = np.concatenate([time[rows - back], np.linspace(-1.0, 0.0, EVENLY)])
    reach = -1.0 - earliest
    beyond = np.zeros(0) if reach <= 0.0 else -1.0 - np.geomspace(min(1.0 / PLACES, reach), reach, BEYOND)
    return np.unique(np.concatenate([beyond, inside]))


@dataclass(frozen=True, slots=True, eq=False)
class _Products:
    """What the inner product of `fit` is made of."""

    weight: Floats  # [T] shown^2 / variance
    product: Floats  # [T] weight x r
    own: Floats  # [T, C] weight, of the row's own stratum
    total: Floats  # [C] W_c + 1 / level_error_c^2
    level: Floats  # [C] the best level of each stratum without a change

    @classmethod
    def of(cls, rows: Moves) -> _Products:
        weight, product = rows.shown**2 / rows.variance, rows.shown * rows.residual / rows.variance
        own = np.zeros((len(weight), len(rows.level_error)))
        own[np.arange(len(weight)), rows.stratum] = weight
        total = own.sum(axis=0) + 1.0 / np.maximum(rows.level_error, SMALLEST_ERROR) ** 2
        sums = np.bincount(rows.stratum, weights=product, minlength=len(total))
        return cls(weight, product, own, total, sums / total)


def _from(values: Floats) -> Floats:
    """Sums from each row on [T + 1, ..]: 0 past the last."""
    sums = np.cumsum(values[::-1], axis=0)[::-1]
    return np.concatenate([sums, np.zeros((1, *values.shape[1:]))])


def _gains(cross: Floats, square: Floats, sign: float) -> Floats:
    """Of log likelihood; 0 where the move is the other way, or nothing tells."""
    tells = (cross * sign > 0.0) & (square > SMALLEST)
    return np.where(tells, cross**2 / (2.0 * np.maximum(square, SMALLEST)), 0.0)


def _best_step(rows: _Products, sign: float) -> float:
    """The largest gain of a step at any row."""
    own = _from(rows.own)[:-1]
    square = _from(rows.weight)[:-1] - (own**2 / rows.total).sum(axis=1)
    return float(_gains(_from(rows.product)[:-1] - own @ rows.level, square, sign).max())


def _best_step_within(rows: _Products, of_windows: NDArray[np.bool_], sign: float) -> float:
    """The largest gain of a step that falls within a window, which shows any part of it; 0 where there is
    none."""
    own, weight = _from(rows.own)[:-1], _from(rows.weight)[:-1]
    cross = _from(rows.product)[:-1] - own @ rows.level
    square = weight - (own**2 / rows.total).sum(axis=1)
    both = weight[1:] - (own[:-1] * own[1:] / rows.total).sum(axis=1)
    gains = _two_steps(cross[:-1], cross[1:], square[:-1], square[1:], both, sign)
    return float(np.where(of_windows[:-1], gains, 0.0).max(initial=0.0))


def _best_two_steps(rows: _Products, time: Floats, places: Floats, sign: float) -> float:
    """The largest gain of two steps the same way, at two of the `places` [P]; 0 where there are none."""
    at = np.searchsorted(time, places, side="left")
    own = _from(rows.own)[at]
    cross = _from(rows.product)[at] - own @ rows.level
    weight = _from(rows.weight)[at]
    both = np.minimum(weight[:, None], weight[None, :]) - (own / rows.total) @ own.T
    square = np.diag(both)
    return float(
        _two_steps(cross[:, None], cross[None, :], square[:, None], square[None, :], both, sign).max()
    )


def _two_steps(
    cross: Floats, cross2: Floats, square: Floats, square2: Floats, both: Floats, sign: float
) -> Floats:
    """The gains of pairs of steps; 0 where they do not go the same way."""
    apart = square * square2 - both**2
    first = square2 * cross - both * cross2  # the heights of the steps, times `apart`
    second = square * cross2 - both * cross
    same_way = (apart > SMALLEST * square.max() ** 2) & (sign * first > 0.0) & (sign * second > 0.0)
    gains = (first * cross + second * cross2) / (2.0 * np.where(same_way, apart, 1.0))
    return np.where(same_way, gains, 0.0)


def _ramps(rows: _Products, time: Floats, places: Floats, sign: float) -> tuple[Floats, Floats]:
    """(gain, height of the ramp) of each onset and end [P, P]; -inf where the end comes first."""
    after = np.searchsorted(time, places, side="right")
    weight, weight1, weight2 = (_from(rows.weight * time**power)[after] for power in range(3))
    own = _from(rows.own * time[:, None])[after] - places[:, None] * _from(rows.own)[after]
    hinge = _from(rows.product * time)[after] - places * _from(rows.product)[after] - own @ rows.level
    onset, end = places[:, None], places[None, :]
    both = weight2 - (onset + end) * weight1 + onset * end * weight  # of the rows after the end
    both = np.where(onset <= end, both, both.T) - (own / rows.total) @ own.T
    length = np.where(end > onset, end - onset, 1.0)
    square = (np.diag(both)[:, None] - 2.0 * both + np.diag(both)[None, :]) / length**2
    cross = (hinge[:, None] - hinge[None, :]) / length
    gains = np.where((end > onset) & (end > time[0]), _gains(cross, square, sign), -np.inf)
    return gains, cross / np.maximum(square, SMALLEST)
