"""The exact oracle: CUSUM of the log-likelihood ratio of the true distributions after and before a change.

It knows the means, spreads and lengths of every segment, the size and course of the change and the
segments it hits; only the moment is unknown. With it, W_t = max over k <= t of the log-likelihood ratio
of "changed at k" to "not changed" for requests up to t (Page 1954; its delay is the shortest possible at
its false-alarm rate, Moustakides 1986).

Summed over k instead, the likelihood ratios are the statistic of Shiryaev and Roberts (Roberts 1966): without
a change its mean grows by 1 per request, so that it needs A requests on average to reach A.

Distribution of a request: accepted ~ beta-binomial(drafted, mean, spread). In sessions the mean of a session
is itself beta-distributed and unknown to the oracle; it is integrated out on a grid, given everything the
session has shown so far. Along a ramp the distribution depends on the age of the change.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammaln

from tests.benchmarks.detection.traffic import LONGEST_SESSION, SESSION_SPREAD, Change, Floats, Ints, Traffic

SESSION_GRID = np.linspace(0.03, 0.97, 32)
SESSION_WINDOW = 400  # requests after which no session that was open at the change is open any more
SESSIONS_AT_ONCE = 1_000
SESSION_STARTS_EVERY = 2  # requests between the moments of change that are tried
RAMP_LEVELS = 40
RAMP_STARTS_EVERY = 20
RARE = 50  # alarms by which the tail of the excursions is fixed


def statistic(traffic: Traffic, change: Change, over: np.ufunc = np.maximum) -> Floats:
    """W_t [N] against a change of this size and course at an unknown moment; log(1 + the sum) where `over` is
    np.logaddexp."""
    if traffic.layout.session is not None:
        return _in_sessions(traffic, change, over)
    if change.ramp > 1:
        return _ramp(traffic, change, over)
    return _windowed(_ratio(traffic, change.drop), None, 0, 1, over)


def threshold(path: Floats, mean_time: float) -> float:
    """The threshold that a path without change crosses once in `mean_time` requests.

    Crossings are counted by excursions (runs above 0). The level that RARE excursions reach fixes the
    constant of mean time ~ C exp(h), which holds for CUSUMs of log-likelihood ratios at large h (Siegmund
    1985).
    """
    starts = np.flatnonzero((path > 0.0) & np.concatenate([[True], path[:-1] <= 0.0]))
    peaks = np.sort(np.maximum.reduceat(path, starts))[::-1]
    seen = min(RARE, len(peaks))
    return float(peaks[seen - 1]) + math.log(mean_time / (len(path) / seen))


def _log_probability(accepted: Ints, drafted: Ints, mean: Floats, spread: float) -> Floats:
    """log P(accepted) up to a term without the mean."""
    precision = mean * (1.0 - mean) / spread**2 - 1.0
    a, b = mean * precision, (1.0 - mean) * precision
    log_law: Floats = (
        gammaln(accepted + a)
        - gammaln(a)
        + gammaln(drafted - accepted + b)
        - gammaln(b)
        - gammaln(drafted + precision)
        + gammaln(precision)
    )
    return log_law


def _ratio(traffic: Traffic, drop: float) -> Floats:
    layout = traffic.layout
    hit = np.isin(layout.code, layout.affected) if layout.affected else np.ones(len(traffic), dtype=bool)
    ratio = np.zeros(len(traffic))
    a, d, mean = traffic.accepted[hit], layout.drafted[hit], layout.mean[hit]
    after = np.clip(mean - drop, 0.03, 0.97)
    ratio[hit] = _log_probability(a, d, after, layout.spread) - _log_probability(a, d, mean, layout.spread)
    return ratio


def _windowed(
    final: Floats, early: Callable[[int], Floats] | None, window: int, every: int, over: np.ufunc
) -> Floats:
    """W_t, at least 0, where a change at k adds early(k) [window] at first and `final` afterwards.

    Without `early` this is Page's recursion.
    """
    n = len(final)
    found = np.zeros(n)
    stands_for = 0.0 if over is np.maximum else math.log(every)  # each k that is tried, of a sum
    entering = np.full(n, -np.inf)  # sums of the moments k whose window ends before t
    if early is None:
        entering[:] = 0.0
    else:
        for k in range(0, n, every):
            sums = np.cumsum(early(k)) + stands_for
            over(found[k : k + window], sums, out=found[k : k + window])
            if k + window < n:
                entering[k + window] = over(entering[k + window], sums[-1])
    total = np.cumsum(final)
    before = np.concatenate([[0.0], total[:-1]])
    settled = total + over.accumulate(entering - before)
    path: Floats = over(found, settled)
    return path


def _ramp(traffic: Traffic, change: Change, over: np.ufunc) -> Floats:
    sizes = change.drop * (np.arange(RAMP_LEVELS) + 0.5) / RAMP_LEVELS
    ratios = np.stack([_ratio(traffic, size) for size in sizes])  # [RAMP_LEVELS, N]
    level = np.arange(change.ramp) * RAMP_LEVELS // change.ramp

    def early(k: int) -> Floats:
        length = min(change.ramp, len(traffic) - k)
        return ratios[level[:length], np.arange(k, k + length)]

    return _windowed(_ratio(traffic, change.drop), early, change.ramp, RAMP_STARTS_EVERY, over)


def _in_sessions(traffic: Traffic, change: Change, over: np.ufunc) -> Floats:
    session = traffic.layout.session
    assert session is not None
    gains = _session_gains(traffic, change.drop)
    seen = np.zeros(int(session.max()) + 1, dtype=np.int64)  # requests of each session before k
    done = 0

    def early(k: int) -> Floats:
        nonlocal done
        np.add.at(seen, session[done:k], 1)
        done = k
        part = slice(k, min(k + SESSION_WINDOW, len(traffic)))
        return gains[np.arange(part.start, part.stop), seen[session[part]]]

    return _windowed(gains[:, 0], early, SESSION_WINDOW, SESSION_STARTS_EVERY, over)


def _session_gains(traffic: Traffic, drop: float) -> Floats:
    """[N, LONGEST_SESSION]: what a request adds to the log-likelihood ratio of a change before the j-th
    request of its session (j = 0: before all of them)."""
    assert traffic.layout.session is not None
    session = np.unique(traffic.layout.session, return_inverse=True)[1]
    order = np.argsort(session, kind="stable")
    lengths = np.bincount(session)
    first = np.cumsum(lengths) - lengths
    gains = np.zeros((len(traffic), LONGEST_SESSION))
    longest_first = np.argsort(-lengths, kind="stable")
    for start in range(0, len(lengths), SESSIONS_AT_ONCE):
        chosen = longest_first[start : start + SESSIONS_AT_ONCE]
        places = [
            order[first[chosen[lengths[chosen] > rank]] + rank] for rank in range(int(lengths[chosen].max()))
        ]
        _fill_gains(gains, traffic, drop, places)
    return gains


def _fill_gains(gains: Floats, traffic: Traffic, drop: float, places: list[NDArray[np.intp]]) -> None:
    """Gains of some sessions, longest first; places[n] are their n-th requests.

    L(j, n) = log of the integral over the session's mean s of the probability of its first n requests, those
        from the j-th on at s - drop, minus the same without a change; the n-th gain is L(j, n) - L(j, n-1).
    """
    layout, prior = traffic.layout, _session_prior(float(traffic.layout.mean[0]))
    kept = np.tile(prior, (len(places[0]), 1))  # [S, G] log weight of s without change
    shifted = np.tile(prior, (len(places), len(places[0]), 1))  # [J, S, G] changed before the j-th
    ratio = np.zeros(shifted.shape[:2])  # L(j, n - 1)
    for n, rows in enumerate(places):
        m = len(rows)
        a, d = traffic.accepted[rows, None], layout.drafted[rows, None]
        shifted[n, :m] = kept[:m]
        kept[:m] += _log_probability(a, d, SESSION_GRID, layout.spread)
        shifted[: n + 1, :m] += _log_probability(
            a, d, np.clip(SESSION_GRID - drop, 0.03, 0.97), layout.spread
        )
        now = _log_sum(shifted[: n + 1, :m]) - _log_sum(kept[:m])
        gains[rows, : n + 1] = (now - ratio[: n + 1, :m]).T
        ratio[: n + 1, :m] = now


def _log_sum(log_weights: Floats) -> Floats:
    """log sum exp over the last axis."""
    peak = log_weights.max(axis=-1)
    log_sum: Floats = peak + np.log(np.exp(log_weights - peak[..., None]).sum(axis=-1))
    return log_sum


def _session_prior(mean: float) -> Floats:
    """log weights of the grid under the beta distribution of a session's mean."""
    precision = mean * (1.0 - mean) / SESSION_SPREAD**2 - 1.0
    log_weight = (mean * precision - 1.0) * np.log(SESSION_GRID)
    log_weight += ((1.0 - mean) * precision - 1.0) * np.log(1.0 - SESSION_GRID)
    log_prior: Floats = log_weight - _log_sum(log_weight)
    return log_prior
