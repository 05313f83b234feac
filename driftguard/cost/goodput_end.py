"""Is a fall of goodput made good by more than half? Pure.

While a fall of size D is open, bets that d of a block (`goodput.py`) lies below D / 2 share one unit of
wealth among all blocks that they may begin at (driftguard.alpha_spending). They need the spread s of blocks
in the long run, and a day of a stream may not show it: a speed that wanders over hours looks calm for as
long. Then a good mood passes for the end. So a fall is over where these bets reach OVER, and one of these
holds too.

**It ended at once.** At a block k the mean of the LAG blocks from k on lies below that of the LAG before by
as much as wandering hardly ever brings about: by -Phi^-1(share(k) / OVER / len(LAGS)) standard deviations of
such steps in the blocks before the fall and while it was open, the larger of both. All blocks since k lie
below D / 2 on average. A speed that wanders slowly makes small steps, which tells it from a repair.

**It lasts.** The bets reach OVER also with s of what was seen up to the likeliest beginning of the end: of
means of blocks of SIZES, before the fall and while it was open, at its upper bound of UNSURE (a chi-squared
variance). Where means of LONG blocks have more than RESOLVED of the variance of means of SHORT ones (of which
that of single requests is hardly a part), the memory of the speed is longer than they are, and s is not
known: then the mean of a day has to lie below D / 4 as well.

Assumptions: steps and means are normal; blocks that are further apart than the largest of SIZES do not depend
on each other, or the day tells. Measured: tests/benchmarks/bench_goodput.py.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtri, ndtri

from driftguard import alpha_spending
from driftguard.cost.block_bets import REACH, STAKES, evidence_of
from driftguard.records.documents.goodput import Watched

Floats = NDArray[np.float64]

OVER: Final = 100.0  # wealth from which on a fall is over
KEPT: Final = 576  # blocks while it is open: two days without a pause
LAGS: Final = (6, 12)  # blocks on either side of a step
ROBUST: Final = 8  # times LAG blocks, from which on the steps while it is open count: one of them is its end
SIZES: Final = (12, 24, 48)
SHORT: Final = 6
LONG: Final = 24
UNSURE: Final = 0.1
RESOLVED: Final = 0.55
A_DAY: Final = 288
_LATER: Final = 96  # blocks for which no more is put on a bet than on the next: early ones know s least


def is_made_good(opened: Watched, past: Sequence[float], spread: float) -> bool:
    """`past`: d of the blocks before the fall, oldest first; `spread`: s of them."""
    if evidence_of(opened.sums) < OVER or not opened.moves:  # kept by an older version: without moves
        return False
    before, since = np.array(past), np.array(opened.moves)
    return _came_at_once(opened, before, since) or _lasts(opened, before, since, spread)


def _came_at_once(opened: Watched, before: Floats, since: Floats) -> bool:
    return any(_stepped(opened, before, since, lag) for lag in LAGS)


def _stepped(opened: Watched, before: Floats, since: Floats, lag: int) -> bool:
    usual, steps = steps_of(before, lag), steps_of(since, lag)
    if len(usual) < lag or len(steps) == 0:
        return False
    deviation = math.sqrt(float((usual**2).mean()))
    if len(since) >= ROBUST * lag:
        deviation = max(deviation, float(np.median(np.abs(steps))) / float(ndtri(0.75)))
    places = np.arange(lag, len(since) - lag + 1)
    shares = _shares(opened, since)[places]
    needed = deviation * -ndtri(shares / OVER / len(LAGS))
    after = np.cumsum(since[::-1])[::-1][places] / (len(since) - places)
    return bool(((-steps >= needed) & (after < opened.slower / 2.0)).any())


def steps_of(moves: Floats, lag: int) -> Floats:
    """Mean of the `lag` blocks from each block on, less that of the `lag` before it."""
    total = np.concatenate([[0.0], np.cumsum(moves)])
    place = np.arange(lag, len(moves) - lag + 1)
    steps: Floats = (total[place + lag] - 2.0 * total[place] + total[place - lag]) / lag
    return steps


def _lasts(opened: Watched, before: Floats, since: Floats, spread: float) -> bool:
    below = opened.slower / 2.0 - since
    begun = int(np.cumsum(below[::-1])[::-1].argmax())
    known = [before, since[:begun]]
    logs = np.log1p(np.outer(STAKES, np.clip(below / lasting_spread(known, spread), -1.0, REACH)))
    wealth = np.exp(np.cumsum(logs[:, ::-1], axis=1)[:, ::-1]) @ _shares(opened, since, _LATER)
    if wealth.mean() < OVER:
        return False
    if part_between_long_means(known) <= RESOLVED:
        return True
    return len(since) >= A_DAY and float(since[-A_DAY:].mean()) < opened.slower / 4.0


def lasting_spread(known: Sequence[Floats], least: float) -> float:
    """s of blocks in the long run, by means of SIZES of them in each of these series; at least `least`."""
    found = least**2
    for size in SIZES:
        squares, freedom = _between(known, size)
        if freedom > 0:
            found = max(found, size * squares / float(chdtri(freedom, 1.0 - UNSURE)))
    return math.sqrt(found)


def part_between_long_means(known: Sequence[Floats]) -> float:
    """Which part of the variance between means of SHORT blocks is that of LONG ones; 1 where none tells."""
    squares, freedom = _between(known, LONG)
    total, _ = _between([moves[len(moves) % LONG :] for moves in known], SHORT)
    return LONG * squares / (SHORT * total) if freedom > 0 and total > 0.0 else 1.0


def _between(known: Sequence[Floats], size: int) -> tuple[float, int]:
    """(sum of squares, degrees of freedom) of means of `size` blocks around their mean in each series."""
    means = [
        moves[len(moves) % size :].reshape(-1, size).mean(axis=1) for moves in known if len(moves) >= size
    ]
    squares = sum(float(((each - each.mean()) ** 2).sum()) for each in means)
    return squares, sum(len(each) - 1 for each in means)


def _shares(opened: Watched, since: Floats, later: int = 0) -> Floats:
    """Of the bets that begin at each of the blocks."""
    first = max(opened.blocks - len(since), 0) + later
    return np.array([alpha_spending.share(first + place) for place in range(len(since))])
