"""Comparisons of before and after.

Acceptance rates are compared with errors that allow for requests that differ; values by their ranks, with the
Mann-Whitney test. A move of the aggregate is taken apart: how much is the mix of its parts, and how much is
their own acceptance. scipy.stats, a second and 50 MB, is imported where it is first used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from scipy.special import ndtri

from driftguard.diagnosis.evidence import Observed
from driftguard.records.documents.acceptance import Acceptance
from driftguard.records.positions import Positions

LEVEL = 0.01  # of every deciding test
QUANTILE_95 = float(ndtri(0.975))  # half a 95% interval of a normal distribution, in standard errors
LARGEST_ERROR = 0.5  # of a rate: what lies between 0 and 1 has no larger standard deviation


@dataclass(frozen=True, slots=True)
class Rate:
    """sum(accepted) / sum(drafted) of n requests, or sessions, with its standard error: see `rate_of`."""

    requests: int
    drafted: float
    rate: float
    error: float


@dataclass(frozen=True, slots=True)
class Difference:
    """after - before, with an interval at 99% and the two-sided p-value of "no difference"."""

    change: float
    low: float
    high: float
    p_value: float

    @property
    def in_words(self) -> str:
        return f"{self.low:+.2f} to {self.high:+.2f} at 99%"

    def excludes(self, size: float) -> bool:
        """No change of this size, in either direction, lies in the interval."""
        return -size < self.low and self.high < size

    def follows(self, move: float, share: float) -> bool:
        """Shown, and in the direction of the signed `move`, by at least this share of it."""
        along = self.change if move > 0 else -self.change
        return self.p_value <= LEVEL and along >= share * abs(move)

    def may_follow(self, move: float, share: float) -> bool:
        """The interval reaches this share of the signed `move`, in its direction."""
        farthest = self.high if move > 0 else -self.low
        return farthest >= share * abs(move)


def rate_of(counts: Iterable[tuple[float, float]]) -> Rate | None:
    """Of (drafted, accepted) pairs; None where nothing was drafted.

    Formula: r = sum a / sum d with the linearised standard error of a ratio of sums,
    se = sqrt(n s^2) / sum d, s^2 = sum (a - r d)^2 / (n - 1). Requests are the units, never tokens.
    One request tells nothing about how requests differ: its error is then LARGEST_ERROR, which is never too
    small. Assumption: independent requests.
    Paper: Cochran, Sampling Techniques (1977), section 6.3.
    """
    pairs = [pair for pair in counts if pair[0] > 0]
    drafted = sum(pair[0] for pair in pairs)
    if drafted == 0:
        return None
    n, rate = len(pairs), sum(pair[1] for pair in pairs) / drafted
    if n == 1:
        return Rate(1, drafted, rate, LARGEST_ERROR)
    squares = sum((a - rate * d) ** 2 for d, a in pairs)
    return Rate(n, drafted, rate, math.sqrt(n * squares / (n - 1)) / drafted)


def acceptance_of(rate: Rate, positions: Positions = "all") -> Acceptance:
    """With its 95% interval, as of many requests."""
    half = QUANTILE_95 * rate.error
    low, high = max(rate.rate - half, 0.0), min(rate.rate + half, 1.0)
    return Acceptance(rate.rate, low, high, rate.requests, positions)


def difference(before: Rate, after: Rate, level: float = 0.99) -> Difference:
    """Welch's comparison of two independent rates.

    Formula: t = (r1 - r0) / sqrt(se0^2 + se1^2), Student with Welch-Satterthwaite degrees of freedom.
    A side of one request says nothing. Assumptions: independent requests, some dozens on each side; the
    level is approximate.
    Paper: Welch, Biometrika 34 (1947).
    """
    change = after.rate - before.rate
    if min(before.requests, after.requests) < 2:
        return interval(change, math.inf, 1.0, level)
    return interval(change, _welch_error(before, after), _welch_freedom(before, after), level)


def interval(change: float, error: float, freedom: float, level: float = 0.99) -> Difference:
    """change +- t error, and the two-sided p-value of change = 0. All are finite: an infinite error says
    nothing, which is an interval of -1 to 1."""
    if math.isinf(error):
        return Difference(change, -1.0, 1.0, 1.0)
    if error == 0.0:
        return Difference(change, change, change, 1.0 if change == 0.0 else 0.0)
    from scipy import stats

    low, high = stats.t.interval(level, freedom, loc=change, scale=error)
    return Difference(change, float(low), float(high), 2.0 * float(stats.t.sf(abs(change) / error, freedom)))


def _welch_error(before: Rate, after: Rate) -> float:
    return math.hypot(before.error, after.error)


def _welch_freedom(before: Rate, after: Rate) -> float:
    parts = before.error**4 / (before.requests - 1) + after.error**4 / (after.requests - 1)
    return _welch_error(before, after) ** 4 / parts if parts > 0 else 1.0


@dataclass(frozen=True, slots=True)
class RankComparison:
    """`superiority`: P(after > before) + P(after = before) / 2; both p-values are of "no difference"."""

    superiority: float
    p_rose: float  # one-sided
    p_value: float  # two-sided


def compare_ranks(before: Sequence[float], after: Sequence[float]) -> RankComparison:
    """U = number of pairs with after > before, ties count half; both samples hold at least one value.

    p by the normal approximation, corrected for ties and for continuity.
    Assumption: independent values, some ten or more on each side.
    Paper: Mann, Whitney, Ann. Math. Stat. 18 (1947); ties as in Lehmann, Nonparametrics (1975), section 1.4.
    """
    if len({*before, *after}) == 1:  # where scipy says nan
        return RankComparison(0.5, 1.0, 1.0)
    from scipy import stats

    rose = stats.mannwhitneyu(after, before, alternative="greater", method="asymptotic")
    moved = stats.mannwhitneyu(after, before, method="asymptotic")
    superiority = float(rose.statistic) / (len(after) * len(before))
    return RankComparison(superiority, float(rose.pvalue), float(moved.pvalue))


Cell = TypeVar("Cell", bound=Hashable)
_QUANTILE_99 = float(ndtri(0.995))  # as QUANTILE_95
_MANY = 1e6  # degrees of freedom at which Student's distribution is the normal one
STEADY_SHARE = 0.25  # of the aggregate's move; what the parts' own changes may add up to
MAIN_SHARE = 0.5  # of a move: what follows it so far is most of it
EXCLUDED_SHARE = 0.5  # of a move: more than that would be shown by the interval


@dataclass(frozen=True, slots=True)
class Decomposition:
    """total = mix + within, exactly. `overlap`: part of the drafted tokens that lies in parts known on both
    sides, sum min(w0, w1); `within_error`: standard error of `within`."""

    before: float
    after: float
    mix: float
    within: float
    within_error: float
    overlap: float

    @property
    def total(self) -> float:
        return self.after - self.before

    @property
    def mix_share(self) -> float:
        """Part of the move that the mix explains, between 0 and 1; 0 where nothing moved."""
        return min(max(self.mix / self.total, 0.0), 1.0) if self.total else 0.0

    @property
    def is_mix_alone(self) -> bool:
        """The mix moved the aggregate; the parts' own changes are small and not shown, and the interval (99%)
        excludes that they are a main part of it."""
        half = _QUANTILE_99 * self.within_error
        if abs(self.within) > min(half, STEADY_SHARE * abs(self.total)):
            return False
        return abs(self.within) + half < EXCLUDED_SHARE * abs(self.total)


def decompose(before: Mapping[Cell, Rate], after: Mapping[Cell, Rate]) -> Decomposition | None:
    """The move of the ratio of sums r = sum_c w_c x_c, w_c a part's share of the drafted tokens.

    Formula (Kitagawa, JASA 50, 1955), exact for every input:
        r1 - r0 = sum_c (w1_c - w0_c) (x0_c + x1_c) / 2  +  sum_c (w0_c + w1_c) / 2 (x1_c - x0_c)
                  = mix                                  +  within
    A part seen on one side only has no change of its own, so it counts as mix.
    within_error assumes independent requests. None where one side is empty.
    """
    if not before or not after:
        return None
    weights0, weights1 = _weights(before), _weights(after)
    mix = within = variance = overlap = 0.0
    for cell in {**before, **after}:
        w0, w1 = weights0.get(cell, 0.0), weights1.get(cell, 0.0)
        x0, x1 = before.get(cell, after.get(cell)), after.get(cell, before.get(cell))
        assert x0 is not None and x1 is not None  # noqa: S101, PT018 (one side has it)
        mix += (w1 - w0) * (x0.rate + x1.rate) / 2
        within += (w0 + w1) / 2 * (x1.rate - x0.rate)
        overlap += min(w0, w1)
        if x0 is not x1:
            variance += ((w0 + w1) / 2) ** 2 * (x0.error**2 + x1.error**2)
    total0 = sum(weights0[cell] * before[cell].rate for cell in before)
    total1 = sum(weights1[cell] * after[cell].rate for cell in after)
    return Decomposition(total0, total1, mix, within, math.sqrt(variance), overlap)


def _weights(rates: Mapping[Cell, Rate]) -> dict[Cell, float]:
    total = sum(rate.drafted for rate in rates.values())
    return {cell: rate.drafted / total for cell, rate in rates.items()}


def rates_by(
    requests: Iterable[Observed], cell_of: Callable[[Observed], Cell]
) -> dict[tuple[Cell, bool], Rate]:
    """Acceptance of each part, of requests judged by their first position apart from the others; parts in
    which nothing was drafted are left out."""
    parts: dict[tuple[Cell, bool], list[Observed]] = {}
    for one in requests:
        parts.setdefault((cell_of(one), one.by_first), []).append(one)
    return {cell: rate for cell, of in parts.items() if (rate := rate_by_session(of)) is not None}


def rate_by_session(requests: Iterable[Observed]) -> Rate | None:
    """`rate_of`, where requests of one named session count as one: they are not independent."""
    return rate_of(_sums_of_sessions((one.session, *judged(one)) for one in requests))


def first_rate_by_session(requests: Iterable[Observed]) -> Rate | None:
    """The same of draft position 1 alone; None where no request tells it."""
    told = ((one.session, one.first_drafted or 0, one.first_accepted or 0) for one in requests)
    return rate_of(_sums_of_sessions(told))


def _sums_of_sessions(requests: Iterable[tuple[str | None, int, int]]) -> Iterator[tuple[int, int]]:
    sums: dict[str, tuple[int, int]] = {}
    for session, drafted, accepted in requests:
        if session is None:
            yield drafted, accepted
        else:
            before = sums.get(session, (0, 0))
            sums[session] = before[0] + drafted, before[1] + accepted
    yield from sums.values()


@dataclass(frozen=True, slots=True)
class Pair:
    """Rates on two sides of one segment."""

    before: Rate
    after: Rate


def combined_difference(pairs: Sequence[Pair], level: float = 0.99) -> Difference | None:
    """after - before inside segments, each weighted by what was drafted after; None without any pair of at
    least two units a side.

    Formula: D = sum w (r1 - r0) / sum w, se^2 = sum w^2 (se0^2 + se1^2) / (sum w)^2; Student, with one degree
    of freedom less than units on the smaller side. Assumption: independent units (requests, or sessions).
    """
    usable = [pair for pair in pairs if min(pair.before.requests, pair.after.requests) > 1]
    total = sum(pair.after.drafted for pair in usable)
    if not usable:
        return None
    weights = [pair.after.drafted / total for pair in usable]
    each = list(zip(weights, usable, strict=True))
    change = sum(w * (pair.after.rate - pair.before.rate) for w, pair in each)
    error = math.sqrt(sum((w * _welch_error(pair.before, pair.after)) ** 2 for w, pair in each))
    units = min(sum(p.before.requests for p in usable), sum(p.after.requests for p in usable))
    return interval(change, error, max(units - len(usable), 1), level)


def difference_of(first: Difference, second: Difference, level: float = 0.99) -> Difference:
    """first - second, of independent requests: the variances behind their intervals add up. Normal."""
    half = math.hypot((first.high - first.low) / 2, (second.high - second.low) / 2)
    return interval(first.change - second.change, half / _QUANTILE_99, _MANY, level)


def judged(one: Observed) -> tuple[int, int]:
    """(drafted, accepted) of the positions that it is judged by."""
    if one.by_first:
        return one.first_drafted or 0, one.first_accepted or 0
    return one.drafted, one.accepted


def of_segments(before: Sequence[Observed], after: Sequence[Observed]) -> Decomposition | None:
    """The decomposition over segments."""
    return decompose(rates_by(before, lambda one: one.segment), rates_by(after, lambda one: one.segment))
