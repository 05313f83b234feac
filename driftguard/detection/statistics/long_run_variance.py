"""How much more than independent observations do dependent ones vary in the long run?

Requests of one conversation are alike, a request that runs for minutes is in many windows of a counter, a mix
of tasks wanders. The mean of n such observations has the variance f v / n, v that of a single one: f, the
variance inflation, is 1 where they are independent. Over the life of a stream f is measured by batch means:
of blocks of B = 2^k observations that follow each other

    W_B = mean over blocks of (sum of what its observations lie above their expectation)^2 / B

W_B is v where observations are independent, and else grows with B up to f v; what moves more slowly than the
longest blocks shows in part. As a stream lives on, the blocks become longer.

Shown: a W_B above v is shown where an F test against v rejects at `shown_level`, with Bonferroni's correction
for the scales. f is the largest W_B / v of the shortest blocks that show it, and of longer ones, whose own
test has less to go by. The mean of the reference period is an estimate, whose error is in all blocks that
came later: n blocks of N observations are expected to add up to (n - 1 + N / n_reference - 1) v. Of requests
that error is taken out from N = LONG_AFTER n_reference on: what counts then is how the later blocks vary
around their own mean; windows may wander for longer than any block.
The error is one draw, and so is g, what it adds while the reference period grows (`_while_growing`). Of
requests the sum is therefore held against a chi-square with the same mean, n - 2 + N / n_reference + g, and
the same variance: with n - 1 degrees of freedom and without g, f was found above 1 in one in ten independent
streams. The size of f leaves g out: with it f would be too small where tasks wander, and false alarms of
windows came every 37,500 instead of every 150,000 in tests/benchmarks/bench_dependent.py.
Where the longest blocks show more at GROWING_LEVEL, f is taken to grow over GROWTH_AHEAD more scales. That is
far-reaching, and the test for it counts g (`_of_mean_error`).

**Together.** What makes requests depend on each other is rarely in one segment alone. So blocks of all strata
of a stream that are equally long are tested as if they were of one (`BlockMeans.together`): they show sooner
that there is dependence, and one stream is one test, not one for each of its strata. Where they do not show
it, a stratum must show its own at SURE_LEVEL. Where they show it at SURE_LEVEL, a stratum that does not show
its own takes f from them, as far as its blocks leave it possible at UNLIKELY while it is young, and as far as
they make it likely later.

Blocks are held against the mean of the reference period, so a change would pass for dependence, and what may
be one waits (`dependence.py`). What blocks that follow each other show counts beside them
(`block_differences.py`).

A young stream cannot show much. Until it has `young` observations the level is YOUNG_LEVEL, so that a
conversation counts before it is proven; then it comes down to `shown_level` with the square of the age. In
bets f is multiplied by 1 + (early / n)^3 after n observations. Alarms of young requests are confirmed
(`confirmation.py`). Windows are given a wider margin instead: by 60 / n standard deviations of one of them.
How far tasks wander shows only in time; a young stream is told of a change of workload (12 standard
deviations in logs of vLLM), and not of what its tasks may cause.

Of requests no block is longer than LIKE_SECONDS: what moves more slowly is a decline or an hour of the day
(`factors.py`), and not that requests depend on each other. Where so much time has fewer than LIKE_REQUESTS,
blocks of as many count: users and conversations take turns by their requests, however long these take.

Papers: Flegal, Jones 2010 (batch means and the long-run variance); Satterthwaite 1946 (the chi-square).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import chdtri, fdtrc, fdtri

from driftguard.detection.statistics.bets import SMALLEST_VARIANCE

Floats = NDArray[np.float64]

SCALES = 16  # B = 1, 2, 4, .. 32,768
# sums over blocks of their sums of x and of l: x^2, x l, l^2, x, l; then x and l of the block that waits for
# its neighbour (0 where none does)
OF_BLOCKS = 7
YOUNG_LEVEL = 0.2
GROWING_LEVEL = 0.01
SURE_LEVEL = 0.01
UNLIKELY = 0.01
GROWTH_AHEAD = 3
LONG_AFTER = 8  # times the reference period: its mean's error, one draw, would then outweigh most blocks
TYPICAL_PART = 2.0 / 3.0  # of the observations so far that a growing reference period holds
LIKE_SECONDS, LIKE_REQUESTS = 3_600.0, 128.0
POSSIBLE = 0.01
LARGEST_INFLATION = 1e4


@dataclass(frozen=True, slots=True)
class Caution:
    """With how few observations of a kind what is said."""

    first: int  # size of the first reference period, about
    least_blocks: int  # before their W_B is looked at
    early: float  # observations
    young: int
    shown_level: float  # at which dependence is shown by more than that
    around_own_mean: bool  # is a lasting distance from the reference period's mean its error, and no wander?
    deviations: float  # of an observation, divided by how many there are: how much wider the margin is


OF_REQUESTS = Caution(400, 8, 300.0, 4_000, 0.01, True, 0.0)
OF_WINDOWS = Caution(12, 6, 12.0, 0, 0.05, False, 60.0)


def add_to_blocks(blocks: Floats, before: int, x: Floats, log_length: Floats) -> Floats:
    """Sums [SCALES, OF_BLOCKS] of a stratum's first `before` observations, and of T more.

    Blocks are joined two by two, so that every sum is the same to the last bit however observations arrive.
    """
    after, sums = blocks.copy(), np.stack([x, log_length], axis=1)
    for scale in range(SCALES):
        if len(sums) == 0:
            break
        own_x, own_l = sums.T
        added = np.stack([own_x * own_x, own_x * own_l, own_l * own_l, own_x, own_l])
        added[:, 0] += after[scale, :5]
        after[scale, :5] = np.add.accumulate(added, axis=1)[:, -1]
        if before >> scale & 1:
            sums = np.vstack([after[scale, 5:], sums])
        after[scale, 5:] = sums[-1] if len(sums) % 2 else 0.0
        pairs = len(sums) // 2
        sums = sums[: 2 * pairs : 2] + sums[1 : 2 * pairs : 2]
    return after


def of_residuals(blocks: Floats, before: int, mean: float, slope: float, middle: float) -> Floats:
    """The same sums of what the observations lie above the line mean + slope (l - middle)."""
    xx, xl, ll, x, line, wait_x, wait_l = blocks.T
    size = np.exp2(np.arange(SCALES, dtype=np.float64))
    level = size * (mean - slope * middle)
    number = np.floor(before / size)
    after = np.zeros_like(blocks)
    after[:, 0] = xx - 2.0 * slope * xl + slope**2 * ll - 2.0 * level * (x - slope * line) + level**2 * number
    after[:, 0] = np.maximum(after[:, 0], 0.0)
    waits = (before >> np.arange(SCALES) & 1) > 0
    after[:, 5] = np.where(waits, wait_x - slope * wait_l - level, 0.0)
    return after


@dataclass(frozen=True, slots=True)
class BlockMeans:
    """What W_B is of, for the blocks of B = 1, 2, 4, .. observations that are enough and short enough."""

    squares: Floats  # [scales] sum over blocks of (sum of their residuals)^2 / B, in variances of one
    expected: Floats  # [scales] the same of independent observations
    with_growth: Floats  # [scales] and with the error that their mean had while its reference period grew
    freedom: Floats  # [scales] degrees of freedom of a chi-square that varies as much
    ahead: int  # longer blocks that are short enough, but too few
    observations: int
    reference: int  # observations that the variance and the mean are from
    caution: Caution

    @classmethod
    def of(
        cls,
        blocks: Floats,
        observations: int,
        variance: float,
        reference: int,
        caution: Caution,
        *,
        longest: float = math.inf,
    ) -> BlockMeans:
        """From the sums of a stratum's residuals [SCALES, OF_BLOCKS], and the variance of one of them.

        `reference` is how many observations that variance and their mean are from, `longest` the largest
        block in observations.
        """
        sizes = np.exp2(np.arange(SCALES, dtype=np.float64))
        number = np.floor(observations / sizes)
        within = sizes <= max(longest, 1.0)
        told = int(((number >= caution.least_blocks) & within).sum())
        sizes, number, squares = sizes[:told], number[:told], blocks[:told, 0]
        of_error = observations / reference
        if caution.around_own_mean and observations > LONG_AFTER * reference:
            later = (observations - reference) / sizes
            squares, of_error = np.maximum(squares - blocks[:told, 3] ** 2 / later, 0.0), 0.0
        squares = squares / sizes / max(variance, SMALLEST_VARIANCE)
        expected = number - 2.0 + of_error
        ahead = int(within.sum()) - told
        if not caution.around_own_mean or observations <= reference:
            return cls(squares, expected, expected, number - 1.0, ahead, observations, reference, caution)
        growing = _while_growing(reference, caution)
        with_growth = expected + growing
        freedom = with_growth**2 / (number - 2.0 + of_error**2 + growing**2)
        return cls(squares, expected, with_growth, freedom, ahead, observations, reference, caution)

    @classmethod
    def together(cls, strata: Sequence[BlockMeans]) -> BlockMeans:
        """Of one stratum or more: their blocks of as many observations, as if they were of one."""
        squares, expected, with_growth, spread = sums = np.zeros((4, max(len(one.squares) for one in strata)))
        for one in strata:
            parts = one.squares, one.expected, one.with_growth, one.with_growth**2 / one.freedom
            sums[:, : len(one.squares)] += np.stack(parts)
        return cls(
            squares,
            expected,
            with_growth,
            with_growth**2 / spread,
            0,
            sum(one.observations for one in strata),
            sum(one.reference - 1 for one in strata) + 1,
            strata[0].caution,
        )

    @property
    def ratio(self) -> Floats:
        """[scales] W_B / v."""
        return self.squares / self.expected

    @property
    def level(self) -> float:
        """At which dependence is shown."""
        age = max(self.observations / self.caution.young, 1.0) if self.caution.young else math.inf
        shown = self.caution.shown_level
        return shown + (YOUNG_LEVEL - shown) / age**2

    def shown(self, level: float | None = None) -> Floats:
        """[SCALES] W_B / v from the shortest blocks on that show it at this level, 1 below.

        The level is by default that of its age.
        """
        level = self.level if level is None else level
        found = np.ones(SCALES)
        told = len(self.squares)
        by_chance = fdtrc(self.freedom, self.reference - 1.0, self.squares / self.with_growth) * told
        found[:told] = np.where(np.logical_or.accumulate(by_chance < level), self.ratio, 1.0)
        return found

    def as_high_as(self) -> Floats:
        """[scales] f that the blocks leave possible: at UNLIKELY while young, later at even odds."""
        unlikely = UNLIKELY if self.observations < self.caution.young else 0.5
        return self.ratio / fdtri(self.freedom, self.reference - 1.0, unlikely)


@dataclass(frozen=True, slots=True)
class Together:
    """What the strata of a stream show together."""

    dependent: bool
    surely: Floats  # [SCALES] W_B / v where SURE_LEVEL shows it, else 1

    @classmethod
    def of(cls, *looks: Sequence[BlockMeans]) -> Together:
        """Of the same strata, looked at once or more."""
        blocks = [BlockMeans.together(strata) for strata in looks if strata]
        surely = [np.ones(SCALES), *(one.shown(SURE_LEVEL) for one in blocks)]
        return cls(any((one.shown() > 1.0).any() for one in blocks), np.max(surely, axis=0))


def inflation(means: BlockMeans, together: Together | None = None) -> float:
    """f of a stratum, judged alone by default."""
    told = len(means.squares)
    if told == 0:
        return 1.0
    found, level = 1.0, means.level
    if together is not None:
        found = max(1.0, float(np.minimum(together.surely[:told], means.as_high_as()).max()))
        level = means.level if together.dependent else SURE_LEVEL
    shown = float(means.shown(level).max())
    if shown == 1.0:
        return min(found, LARGEST_INFLATION)
    ratio, last = means.ratio, means.observations >> (told - 1)
    of_error = _of_mean_error(means.observations, means.reference, means.caution)
    least = float(means.squares[-1] / (last - 1.0 + of_error))
    found = max(found, shown)
    if told > 2 and fdtrc(last - 1.0, means.reference - 1.0, least) * told < GROWING_LEVEL:
        found = max(found, float(ratio[-1] * _growth(ratio) ** min(GROWTH_AHEAD, means.ahead)))
    return min(found, LARGEST_INFLATION)


def largest_wander(
    blocks: Floats, observations: int, variance: float, caution: Caution, longest: float
) -> float:
    """tau, the largest standard deviation of a mean that wanders which the blocks leave possible.

    Formula: var(mean of a block) = v / B + tau^2 where the mean hardly moves within a block; the upper limit
    of that at POSSIBLE, by chi-square with m - 1 degrees of freedom for m blocks, less v / B; the least over
    the scales with blocks enough. Infinity where no scale has. Takes the sums of residuals [SCALES,
    OF_BLOCKS] of so many observations, `variance` v and `longest` as `inflation` does.
    """
    sizes = np.exp2(np.arange(SCALES, dtype=np.float64))
    number = np.floor(observations / sizes)
    told = (number >= caution.least_blocks) & (sizes <= max(longest, 1.0))
    if not told.any():
        return math.inf
    number, sizes = number[told], sizes[told]
    of_means = blocks[told, 0] / sizes**2 / chdtri(number - 1.0, 1.0 - POSSIBLE)
    return float(np.sqrt(np.maximum(of_means - variance / sizes, 0.0).min()))


def least_variance(variance: float, reference: int) -> float:
    """The lower limit at POSSIBLE of a variance that is estimated from so many observations."""
    freedom = max(reference - 1.0, 1.0)
    return variance * freedom / float(chdtri(freedom, POSSIBLE))


def _of_mean_error(observations: int, reference: int, caution: Caution) -> float:
    """What the error of the reference period's mean adds to the sum of n blocks, in v: the sum over all
    observations of 1 / (the size that the period had then). While it grows that is half to all of those so
    far."""
    return _while_growing(reference, caution) + (observations - reference) / reference


def _while_growing(reference: int, caution: Caution) -> float:
    return math.log(max(reference / caution.first, 1.0)) / TYPICAL_PART


def _growth(ratio: Floats) -> float:
    """From one scale to the next, at the last ones: between 1 and 2, which is what a mere drift shows."""
    return float(np.clip(np.sqrt(ratio[-1] / max(ratio[-3], 1.0)), 1.0, 2.0))
