"""Windows of a counter: few observations, each of thousands of drafted tokens.

Bets on x in [0, 1] cannot double on such data: a fall of .1 moves the wealth by a tenth. What is bet on
instead is the shortfall of a window, in standard deviations of windows with as many drafted tokens:

    s = min(max((mean - x) / sd(drafted), 0), 16)        sd^2 = v (share + (1 - share) typical / drafted)

against the null E[s | past] <= k, k = mean shortfall of the reference period + its margin. The bet is
e = 1 + .98 f (s / k - 1) >= .02, f ten values log-spaced over .25 to 1, so that a window which lies ten
standard deviations low multiplies the evidence by about 13. That better than the mean counts as the
mean is what makes the stake so large; that no window counts beyond 16 bounds what one outlier can do
(at A = 100,000 it takes five such windows in a row). A rise is the mirror image.

Assumptions: only that windows in control fall short by k at most on average; no distribution, and
nothing about the mean beyond that. v is the variance between windows of typical traffic; `share` of it
is there at any traffic, the rest falls with the drafted tokens. A wrong sd that the windows of the
reference period do not show (much less traffic than any of them had) can break the null.
Guarantee: that of `evidence.py`, conditional on k. k is estimated from WINDOW_REFERENCE windows with a
Student margin, which fails in about 2% of streams if they are independent; windows are often not.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from scipy.special import stdtrit

from driftguard.detection.statistics.baseline import TWO_ERRORS_LEVEL
from driftguard.detection.statistics.bets import BETS, LARGEST_STAKE, SMALLEST_VARIANCE, Floats

Ints = NDArray[np.int64]

WINDOW_REFERENCE = 12  # windows
LEARNED = 6  # mean, v, share, typical drafted tokens, mean shortfall of a fall, of a rise
FRACTIONS: Floats = np.geomspace(0.25, 1.0, BETS)
LARGEST_SHORTFALL = 16.0
SHORTFALL_DEVIATION = 0.58  # of a normal distribution, sqrt(1/2 - 1/(2 pi)): twelve windows may show less
SMALLEST_MARGIN = 0.01  # of acceptance
_SHARES = (0.5, 0.4, 0.6, 0.3, 0.7, 0.2, 0.8, 0.1, 0.9, 0.0, 1.0)  # the first of equally likely ones is taken


def learn(x: Floats, drafted: Floats) -> Floats:
    """[LEARNED] from the windows of a reference period.

    mean, v and share maximise the Gaussian likelihood over a grid of shares (the mean is then weighted
    by 1 / sd^2); where the traffic hardly varied the share cannot be told, and is a half.
    """
    n, typical = len(x), len(x) / float((1.0 / drafted).sum())
    best = (-math.inf, np.zeros(4))
    for share in _SHARES:
        shape = share + (1.0 - share) * typical / drafted
        mean = float((x / shape).sum() / (1.0 / shape).sum())
        variance = max(float(((x - mean) ** 2 / shape).sum()) / (n - 1), SMALLEST_VARIANCE)
        likelihood = -(n * math.log(variance) + float(np.log(shape).sum())) / 2.0
        if likelihood > best[0] + 1e-9:
            best = (likelihood, np.array([mean, variance, share, typical]))
    learned = np.tile(np.append(best[1], [0.0, 0.0]), (n, 1))
    falls, rises = (shortfall(learned, x, drafted, rise=rise).mean() for rise in (False, True))
    return np.append(best[1], [falls, rises])


def deviation(learned: Floats, drafted: Floats) -> Floats:
    """sd of each window [T] whose stratum learned [T, LEARNED]."""
    share = learned[:, 2]
    variance = learned[:, 1] * (share + (1.0 - share) * learned[:, 3] / drafted)
    return np.sqrt(np.maximum(variance, SMALLEST_VARIANCE))


def shortfall(learned: Floats, x: Floats, drafted: Floats, *, rise: bool) -> Floats:
    gap = x - learned[:, 0] if rise else learned[:, 0] - x
    return np.clip(gap / deviation(learned, drafted), 0.0, LARGEST_SHORTFALL)


def window_margin(learned: Floats, drafted: Floats, ignore: float) -> Floats:
    """Of acceptance: Student's margin of the mean shortfall, at least what is to be ignored (and at least
    SMALLEST_MARGIN: a counter does not tell the segments apart, whose mix moves it), at most 1.

    A window whose deviation makes the margin 1 cannot fall (or rise) by more, and loses every bet.
    """
    student = float(stdtrit(WINDOW_REFERENCE - 1, TWO_ERRORS_LEVEL))
    margin = student * SHORTFALL_DEVIATION / math.sqrt(WINDOW_REFERENCE)
    return np.clip(margin * deviation(learned, drafted), max(ignore, SMALLEST_MARGIN), 1.0)


def window_factors(learned: Floats, x: Floats, drafted: Floats, margin: Floats, *, rise: bool) -> Floats:
    """e [T, BETS] of windows; `margin` [T] in acceptance."""
    allowed = learned[:, 5 if rise else 4] + margin / deviation(learned, drafted)
    surplus = shortfall(learned, x, drafted, rise=rise) / allowed - 1.0
    return 1.0 + LARGEST_STAKE * FRACTIONS * surplus[:, None]


def window_recovery_factors(
    learned: Floats, x: Floats, drafted: Floats, middle: Floats, halfway: Floats, *, fall: bool
) -> Floats:
    """e [T, BETS] against "not back past the midpoint yet", for recovery tests.

    What counts is how far a window lies on the good side of a point q before the midpoint, in units of
    q = max(halfway / 4, sd / 2): the null is that this is at most 1 on average, which holds where x is
    around its changed level (a whole `halfway` before the midpoint) with that sd.
    """
    unit = np.maximum(halfway / 4.0, deviation(learned, drafted) / 2.0)
    ahead = (x - middle if fall else middle - x) / unit
    return 1.0 + LARGEST_STAKE * FRACTIONS * np.clip(ahead, -1.0, LARGEST_SHORTFALL)[:, None]


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
