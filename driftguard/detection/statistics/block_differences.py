"""How much more do observations vary in the long run than independent ones, by blocks that follow each other?

The sums of blocks of `long_run_variance.py` are held against a mean that was learned before, and cannot tell
a change from a mean that wanders: what may be a change waits there, and is never counted while an incident is
open. How far a block lies from the next one says less, but is not moved by the level: a change at once shows
in one or two differences, a decline hardly in any, a mean that wanders in most. So all observations count.
Where it is known from when to when the level was another one, these observations are a run of their own,
those before and behind them one run: no difference is across the edges.

For blocks of B = 2^k observations with sums S_i of what lies above the expectation, v the variance of one:

    D_B = mean over i of (S_(i+1) - S_i)^2 / (2 B v)

over all but the largest: OF_CHANGE for each change at once that there may have been, or an eighth of them if
that is more. What a chi-square of one degree of freedom loses by that is made up for. D_B is 1 where
observations are independent, and else grows with B up to f, the variance inflation.

Shown: a D_B above 1 is shown where an F test rejects at SHOWN_LEVEL, with Bonferroni's correction for the
scales. n differences that are left, without k, have (n - k / 2 - 1) / 2 degrees of freedom, because
neighbours share a block (simulated with 12 to 128 normal blocks, k = 2 and 4: the .99 quantile is that of as
many degrees of freedom, or of up to a sixth more).

Blocks may be of any length in time: a decline over days is in few of the differences, or small in each. So
where few requests come in an hour, these blocks are longer than those that are held against the mean, and
alone in showing a mean that wanders for hours. Blocks of B that are short against its memory m show little
of it. Of an autoregression

    D_B - 1 = (f - 1) h(B / m),  h(u) = 1 - (a + a^2 / 2) / u,  a = 1 - e^-u

(from the variance and the covariance of its sums over two blocks). Where the longest blocks are as long as
any that may be held against the mean, and show it, how much D_B - 1 has grown over their last two scales
tells h, and so f; no h is taken to be below LEAST_PART.

Paper: von Neumann 1941 (the ratio of the mean square successive difference to the variance).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtrc, ndtri

from driftguard.detection.statistics.bets import SMALLEST_VARIANCE
from driftguard.detection.statistics.long_run_variance import LARGEST_INFLATION

Floats = NDArray[np.float64]

LEAST_LEFT: Final = 10  # differences, of which a D_B is
OF_CHANGE: Final = 2  # differences that a change at once in the middle of a block shows in
SPARED: Final = 1.0 / 8.0  # of the differences
SHOWN_LEVEL: Final = 0.01
LEAST_PART: Final = 1.0 / 8.0


def inflation_shown(
    runs: Sequence[Floats], variance: float, reference: int, changes: int, *, against_mean: float = math.inf
) -> float:
    """f that the residuals of observations in their order show; 1 where none is shown. The level
    may have changed from one of the runs to the next: no block and no difference is of two of them.

    `variance` is that of one of them, from `reference` observations; `changes` how many changes at once there
    may be inside the runs; `against_mean` the largest block, in observations, that may be held against
    the mean.
    """
    ratios: list[float] = []
    freedom: list[float] = []
    size = 2
    while (left := _left(_differences(runs, size), changes)) >= LEAST_LEFT:
        squares = np.sort(np.concatenate([np.diff(_sums(run, size)) ** 2 for run in runs]))
        mean = float(squares[:left].mean()) / _mean_below(left / len(squares))
        ratios.append(mean / (2.0 * size * max(variance, SMALLEST_VARIANCE)))
        freedom.append((left - (len(squares) - left) / 2.0 - 1.0) / 2.0)
        size *= 2
    by_chance = fdtrc(freedom, reference - 1.0, ratios) * len(ratios)
    shown = [ratio for ratio, chance in zip(ratios, by_chance, strict=True) if chance < SHOWN_LEVEL]
    if size // 2 >= against_mean and len(ratios) > 2 and by_chance[-1] < SHOWN_LEVEL:
        grown = (ratios[-1] - 1.0) / max(ratios[-3] - 1.0, 1e-9)
        shown.append(1.0 + (ratios[-1] - 1.0) / _part_shown(grown))
    return min(max([1.0, *shown]), LARGEST_INFLATION)


def _part(memories: Floats) -> Floats:
    """h of the formula above, of blocks of so many memories."""
    a = -np.expm1(-memories)
    part: Floats = 1.0 - (a + a * a / 2.0) / memories
    return part


_MEMORIES: Final = np.exp2(np.arange(8.0, -4.0, -0.25))  # from the longest blocks on
_PARTS: Final = _part(_MEMORIES)
_GROWN: Final = _PARTS / _part(_MEMORIES / 4.0)


def _part_shown(grown: float) -> float:
    """Which part of f - 1 blocks show, if those a quarter as long show so many times less."""
    return max(float(np.interp(grown, _GROWN, _PARTS)), LEAST_PART)


def _sums(run: Floats, size: int) -> Floats:
    """Over the blocks of so many residuals, of which the last one ends with the run."""
    number = len(run) // size
    sums: Floats = run[len(run) - number * size :].reshape(number, size).sum(axis=1)
    return sums


def _differences(runs: Sequence[Floats], size: int) -> int:
    return sum(max(len(run) // size - 1, 0) for run in runs)


def _left(differences: int, changes: int) -> int:
    """How many of so many differences count."""
    return differences - max(OF_CHANGE * changes, round(SPARED * differences))


def _mean_below(part: float) -> float:
    """The mean of a chi-square of one degree of freedom over its smallest `part`, below 1.

    Formula: 1 - 2 a phi(a) / part with a the normal quantile of 1/2 + part / 2 and phi the normal density.
    """
    end = float(ndtri(0.5 + part / 2.0))
    return 1.0 - 2.0 * end * math.exp(-(end**2) / 2.0) / math.sqrt(2.0 * math.pi) / part
