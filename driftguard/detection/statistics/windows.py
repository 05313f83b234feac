"""Windows of a counter: one observation per scrape, of thousands of drafted tokens.

A window is a mean of many requests, so that its acceptance is about normal and its variance falls with the
tokens drafted in it, though not all of it does (the mix of the moment is there at any traffic):

    v(drafted) = v (share + (1 - share) typical / drafted)

share and typical (drafted tokens) are learned from the first windows. All else is as for requests: bets in
standard deviations (`bets.py`) against a safe baseline. Windows that follow each other share the requests
that run through both, and the mix of tasks: that is their variance inflation (`long_run_variance.py`).

Assumptions: a wrong variance that the windows of the reference period do not show (much less traffic than any
of them had) can break the null; MARGIN_ERRORS standard errors instead of two make up for how few
they are, and for the inflation being an estimate.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.statistics.bets import SMALLEST_VARIANCE, Floats

WINDOW_REFERENCE = 12  # windows, at least
LEARNED = 2  # share, typical drafted tokens
MARGIN_ERRORS = 2.0  # times the two standard errors of requests
LARGEST_SHORTFALL = 16.0  # standard deviations that a window counts at most: one outlier raises no alarm
SMALLEST_MARGIN = 0.01  # of acceptance: a counter does not tell the segments apart, whose mix moves it
LIFETIMES = 10.0  # of what windows share: the reference period is at least so long
LONGEST_START = 240  # windows: after so many a stream is watched, and its reference goes on growing
LONGEST_TOLD = 1_440  # the same where the lifetime of requests is told
_SHARES = (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.1, 0.9, 0.0, 1.0)  # the first of equally likely ones is taken


def learn(x: Floats, drafted: Floats) -> Floats:
    """[LEARNED] from the windows of a reference period.

    share maximises the Gaussian likelihood over a grid; where the traffic hardly varied it cannot be
    told, and is a half.
    """
    n, typical = len(x), len(x) / float((1.0 / drafted).sum())
    best = (-math.inf, 0.5)
    for share in _SHARES:
        shape = share + (1.0 - share) * typical / drafted
        mean = float((x / shape).sum() / (1.0 / shape).sum())
        variance = max(float(((x - mean) ** 2 / shape).sum()) / (n - 1), SMALLEST_VARIANCE)
        likelihood = -(n * math.log(variance) + float(np.log(shape).sum())) / 2.0
        if likelihood > best[0] + 1e-9:
            best = (likelihood, share)
    return np.array([best[1], typical])


def relative_variance(learned: Floats, drafted: Floats) -> Floats:
    """Of each window [T] whose stratum learned [T, LEARNED], against one of typical traffic."""
    share, typical = learned[:, 0], learned[:, 1]
    return np.asarray(share + (1.0 - share) * typical / np.maximum(drafted, 1.0))


def lifetime(running: int, started: int) -> float:
    """For how many windows a request runs, from the sums over windows of the requests that ran and of those
    that started (Little's law); 0 where they tell neither. Where none ever started, requests are long, or
    their counter is not kept: then a stream does not wait for longer than without it."""
    return running / started if started else min(float(running), LONGEST_START / LIFETIMES)


def needed_windows(windows: int, inflation: float, lifetime: float, usual: int) -> int:
    """Size of the reference period: what is `usual` (`baseline.py`), and LIFETIMES of what windows share.

    That is the requests that run through both, for so many windows, and what else shows in f: as much as
    lifetimes of (f - 1) / 2 windows do. It is lengthened by a quarter at a time, because all are known better
    with each.
    """
    shown = min(LIFETIMES * (inflation - 1.0) / 2.0, float(LONGEST_START))
    told = min(LIFETIMES * lifetime, float(LONGEST_TOLD))
    wanted = max(WINDOW_REFERENCE, usual, math.ceil(max(shown, told)))
    return min(wanted, max(windows + 1, windows * 5 // 4))


def odd_start(x: Floats, gap: float) -> int:
    """How many of the first windows [T] are of an odd time, and not of the usual traffic that followed.

    Those of the best fit by two levels, where the first is below the other by `gap` or more and lasts for a
    quarter of all at most, and where no later run of as many windows comes halfway down to it: so tasks that
    wander are left alone, as they come back. 0 where there are none.
    """
    n, sums = len(x), np.concatenate([[0.0], np.cumsum(x)])
    first = np.arange(1, n)
    before, rest = sums[first] / first, (sums[-1] - sums[first]) / (n - first)
    rise = np.maximum(rest - before, 0.0)
    best = int(np.argmax(rise**2 * first * (n - first)))
    odd = int(first[best])
    if rise[best] < gap or 4 * odd > n:
        return 0
    runs = (sums[2 * odd :] - sums[odd : n + 1 - odd]) / odd
    return odd if runs.min() > (before[best] + rest[best]) / 2.0 else 0


def after_gap(
    is_window: NDArray[np.bool_], started_at: Floats, ended_at: Floats, last_end: float
) -> tuple[NDArray[np.bool_], float]:
    """Windows [N] that begin more than half a window after the one before ended, and the last end.

    The counter was restarted or a scrape was missed: what such a window holds is not known.
    `last_end` is NaN before the first window.
    """
    gap = np.zeros(len(is_window), dtype=np.bool_)
    places = np.flatnonzero(is_window)
    if len(places) == 0:
        return gap, last_end
    start, end = started_at[places], ended_at[places]
    before = np.append(last_end, end[:-1])
    gap[places] = start - before > (end - start) / 2.0  # NaN: not known, no gap
    return gap, float(end[-1])
