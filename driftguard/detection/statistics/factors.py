"""Acceptance that depends on the hour of day, the day of the week, the prompt, or the length of the answer in
another way than by a line: learned from days and from weeks, without learning a drift.

The factors, and their cells:
- 24 hours of a day, in UTC;
- 28 quarters of the days of a week that begins on Thursday, in UTC: a weekend begins at another hour in every
  time zone, so days as a whole would not tell it;
- lengths of the prompt (PROMPT_LENGTHS) by how much of it was cached (CACHED_SHARES);
- lengths of the answer, in steps of a factor of four. Not where the length follows from acceptance.

A cycle is a day, of the week a week. Per stratum and cell h, residuals r around the line (`baseline.py`),
less the effects of the other factors, are averaged over one cycle. A cycle d that is over is compared with
itself only:

    c_dh = r_dh - a_d,  a_d = mean over h of r_dh - g_h, weighted by requests

with g_h what is known of the cells so far (on the first cycle: 0), so that neither the level of the cycle nor
the cells that it happens to have matter. g_h is the mean of c_dh over cycles, weighted by requests and by
exp(-age / forgetting). The level stays what the reference period said: a request of cell h is expected
at the line + g_h - the mean of g over the cells of the reference period's own requests. A slow decline
moves every cycle's a_d and no g_h, so it is not learned; what it does within a day is learned, a sawtooth of
half a day's decline. Within a week that would be much, so there a_d is a line in time, and so is what g_h
never has: an effect of single days is what is left, and a weekend, in the middle of such a week, hardly looks
like a line (an eighth of it at either end). A week has to be coarse, and what is usual changes somewhere in a
cell, not at its edge: what lies between a cell and its neighbours, beyond their errors, is in its margin.

Used from LEAST_CYCLES of them on, once the F test of the two-way layout cells x cycles says at PROFILE_LEVEL
that cells differ by more than cycles disagree about them, and they lie further apart than what is to be
ignored. Those that LEAST_CYCLES have seen must say so alone at REPEATED_LEVEL, as a fault of one day would be
the rhythm of the hours that no other has seen. From then on the end of every cycle brings it up to date. An
operator who says that a change is usual has it used at once (`taken_as_usual`).
Cells are shrunken to their mean by empirical Bayes, g_h = g + t / (t + s / N_h) (c_h - g), with s the mean
square of the disagreement, N_h the weight of the cell and t the variance between cells by moments. The
variance that is left, t s / (t N_h + s), goes into the margin of every request (`expectation.py`); a cell
never seen is expected at the mean of the cells, with variance t.
A cycle counts when it has LEAST_REQUESTS requests in `least_cells` cells. The one that is least like the
others is set aside: what is known is without it where it disagrees with them more than they do with each
other, by an F test at STANDS_OUT. So a fault while a rhythm is learned, which nothing tells from it then, is
not learned with it once two other cycles are over. A cycle with fewer than LEAST_SHARED requests in cells
known before cannot be compared with those before: after two of them what was learned is given up.
Until a profile is used it raises alarms, as nothing tells it from a change before cycles have passed; those
with incidents therefore count. After that, requests of segments with an open incident do not, so that a
step within a cycle is not taken for its cells. Where incidents begin at the same time of two cycles in a row
(`begins_again`), what is usual has moved, as office hours do in UTC when clocks are changed: what was learned
is forgotten, and used until LEAST_CYCLES more say what is usual now. Those with incidents count again.
Assumptions: cells act on acceptance in the same way in every cycle, up to slow changes; cycles disagree
independently; the effects of several factors add up.
Papers: Scheffe, The Analysis of Variance (1959), chapter 4; Morris 1983 (empirical Bayes).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtrc

from driftguard.detection.findings import FactorName

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

HOUR, MILLISECONDS_PER_DAY = 3_600_000, 86_400_000
NOT_BEGUN = -(2**31)
LEAST_CYCLES = 2
LEAST_REQUESTS = 100.0
LEAST_SHARED = 50.0  # requests of a cycle in cells that are known, to tell its level
LEAST_STRAYS = 100
PROFILE_LEVEL = 1e-3
REPEATED_LEVEL = 0.01  # of the cells that several cycles have seen alone
STANDS_OUT = 1e-4  # chance of what a cycle disagrees with the others by, below which it is left out
SMALLEST_DISAGREEMENT = 1e-9
SAME = 1e-9  # relative difference of two sums that are one but for rounding


PROMPT_LENGTHS = np.array([512, 2_048, 8_192])  # tokens; those of an unknown length are with the shortest
CACHED_SHARES = np.array([0.1, 0.6])  # of the prompt
PROMPT_CELLS = (len(PROMPT_LENGTHS) + 1) * (len(CACHED_SHARES) + 1)
LENGTH_STEP = float(np.log(4.0))


class Rows(Protocol):
    """What the cells of T requests follow from."""

    @property
    def ended_ms(self) -> Ints: ...

    @property
    def prompt_tokens(self) -> Ints: ...

    @property
    def cached_tokens(self) -> Ints: ...

    @property
    def log_length(self) -> Floats: ...


@dataclass(frozen=True, slots=True)
class Factor:
    """What acceptance may depend on. Cycles are counted from 1 January 1970 UTC, a Thursday."""

    name: FactorName
    milliseconds: int  # of a cycle
    cells: int
    least_cells: int  # with traffic, for a cycle to count
    forgetting: float  # age in cycles by which the weight has fallen to 1 / e
    coarse: bool  # acceptance drifts enough within a cycle, and changes enough within a cell, to be seen to
    repeated: float  # of the cells, weighted by age, that must have been seen again before a profile is used
    same_time: int = -1  # of a cycle: moments up to so many milliseconds apart; below 0: there is none

    def number(self, ended_ms: Ints) -> Ints:
        """Of the cycle that each moment lies in [T]."""
        return np.asarray(ended_ms // self.milliseconds)

    def cell(self, rows: Rows) -> Ints:
        """[T] below `cells`."""
        if self.name == "prompt":
            return _of_prompts(rows.prompt_tokens, rows.cached_tokens)
        if self.name == "answer":
            steps = (rows.log_length / LENGTH_STEP).astype(np.int64)
            return np.asarray(np.clip(steps, 0, self.cells - 1))
        return np.asarray(rows.ended_ms % self.milliseconds * self.cells // self.milliseconds)

    def begins_again(self, onset_ms: int, before_ms: Ints) -> NDArray[np.bool_]:
        """Whether what began at this moment begins a cycle after what began at those [C]."""
        apart = np.abs(onset_ms - before_ms - self.milliseconds)
        return np.asarray(apart <= self.same_time)

    @property
    def lost(self) -> float:
        """Degrees of freedom that a_d takes."""
        return 2.0 if self.coarse else 1.0


DAY = Factor("day", MILLISECONDS_PER_DAY, 24, 6, 14.0, coarse=False, repeated=0.0, same_time=3 * HOUR)
WEEK = Factor("week", 7 * MILLISECONDS_PER_DAY, 28, 7, 8.0, coarse=True, repeated=0.7, same_time=12 * HOUR)
PROMPT = Factor("prompt", MILLISECONDS_PER_DAY, PROMPT_CELLS, 2, 14.0, coarse=False, repeated=0.0)
ANSWER = Factor("answer", MILLISECONDS_PER_DAY, 8, 2, 14.0, coarse=False, repeated=0.0)
FACTORS = (DAY, WEEK, PROMPT, ANSWER)
OF_TIME = FACTORS[:2]
CELLS = sum(factor.cells for factor in FACTORS)


def _of_prompts(prompt_tokens: Ints, cached_tokens: Ints) -> Ints:
    """The cell of each prompt [T]; tokens are -1 where not given."""
    length = np.searchsorted(PROMPT_LENGTHS, prompt_tokens, side="right")
    share = np.searchsorted(CACHED_SHARES, cached_tokens / np.maximum(prompt_tokens, 1), side="right")
    return np.asarray(length * (len(CACHED_SHARES) + 1) + share)


@dataclass(frozen=True, slots=True, eq=False)
class Profile:
    """What is known of the H cells of one factor in each of C strata."""

    number: int  # of the cycle under way
    strays: int  # rows since the last one of this cycle
    current: Floats  # [C, H, 2] requests, sum of r
    totals: Floats  # [C, H, 3] over earlier cycles, weighted by age: requests N, N c, N c^2
    cycles: Floats  # [C, 2] of the totals; sum of (their cells - 1), weighted by age
    seen: NDArray[np.uint8]  # [C, H] how many of these have requests of the cell, up to LEAST_CYCLES
    aside: Floats  # [C, H, 2] one more, which is the least like them: requests, sum of r
    reference: Floats  # [C, H] requests of the reference period
    used: NDArray[np.bool_]  # [C]
    effect: Floats  # [C, H] what is added to the line; 0 unless used
    variance: Floats  # [C, H] of the effect
    moved: NDArray[np.bool_]  # [C] what is used is of before, and to be learned anew

    @classmethod
    def none(cls, cells: int, strata: int = 0) -> Profile:
        nothing = np.zeros((strata, cells))
        return cls(
            number=NOT_BEGUN,
            strays=0,
            current=np.zeros((strata, cells, 2)),
            totals=np.zeros((strata, cells, 3)),
            cycles=np.zeros((strata, 2)),
            seen=np.zeros((strata, cells), dtype=np.uint8),
            aside=np.zeros((strata, cells, 2)),
            reference=nothing,
            used=np.zeros(strata, dtype=np.bool_),
            effect=nothing,
            variance=nothing,
            moved=np.zeros(strata, dtype=np.bool_),
        )

    @property
    def cells(self) -> int:
        return int(self.effect.shape[1])

    @property
    def amplitude(self) -> Floats:
        """Of each stratum's profile [C]; 0 unless used."""
        return amplitude(self.effect)

    @property
    def has_aside(self) -> NDArray[np.bool_]:
        """Of each stratum [C]."""
        return np.asarray(self.aside[..., 0].any(axis=1))

    @property
    def counted(self) -> Ints:
        """How many cycles counted, of each stratum [C]."""
        return np.asarray(self.cycles[:, 0].astype(np.int64) + self.has_aside)

    def with_current(self, current: Floats, *, strays: int) -> Profile:
        """With these sums of the cycle under way."""
        known = self.totals, self.cycles, self.seen, self.aside, self.reference
        return Profile(
            self.number, strays, current, *known, self.used, self.effect, self.variance, self.moved
        )

    def learned_anew(self, strata: NDArray[np.bool_]) -> Profile:
        """In which these strata [C] have moved: nothing is known but what is used until more is."""
        begun = strata & self.used & ~self.moved
        totals = np.where(begun[:, None, None], 0.0, self.totals)
        cycles = np.where(begun[:, None], 0.0, self.cycles)
        seen = np.where(begun[:, None], 0, self.seen).astype(np.uint8)
        aside = np.where(begun[:, None, None], 0.0, self.aside)
        moved = self.moved | begun
        return replace(self, totals=totals, cycles=cycles, seen=seen, aside=aside, moved=moved)

    def followed_by(self, strata: int) -> Profile:
        """With a row for each of so many new strata."""
        return self._joined(Profile.none(self.cells, strata), np.concatenate)

    def without(self, forgotten: NDArray[np.bool_]) -> Profile:
        """With nothing known of the strata [C] that are `forgotten`, their reference period neither."""

        def keep(pair: list[NDArray[Any]]) -> NDArray[Any]:
            return np.where(forgotten.reshape(-1, *[1] * (pair[0].ndim - 1)), pair[1], pair[0])

        return self._joined(Profile.none(self.cells, len(forgotten)), keep)

    def _joined(self, other: Profile, join: Any) -> Profile:
        columns = [item.name for item in fields(self) if item.name not in ("number", "strays")]
        return replace(self, **{name: join([getattr(self, name), getattr(other, name)]) for name in columns})


Profiles = tuple[Profile, ...]  # one for each of FACTORS


def no_profiles(strata: int = 0) -> Profiles:
    return tuple(Profile.none(factor.cells, strata) for factor in FACTORS)


def amplitude(effect: Floats) -> Floats:
    """Half of what lies between the best and the worst cell [C]."""
    half: Floats = (effect.max(axis=1) - effect.min(axis=1)) / 2.0
    return half


def cycles_begun(number: int, strays: int, numbers: Ints) -> tuple[list[tuple[int, int]], int]:
    """(place, number) where another cycle begins among rows of `numbers` [T], and the strays after them.

    The next cycle begins with its first row. Rows of any other are strays: late, or of a wrong clock.
    Their cycle begins once LEAST_STRAYS rows in a row were not of the one under way.
    """
    if (numbers == number).all():  # as in nearly every batch
        return [], strays if len(numbers) == 0 else 0
    begun: list[tuple[int, int]] = []
    starts = np.flatnonzero(np.diff(numbers, prepend=numbers[:1] - 1))  # of runs of one cycle
    lengths = np.diff(starts, append=len(numbers))
    for start, length, other in zip(starts.tolist(), lengths.tolist(), numbers[starts].tolist(), strict=True):
        if other == number:
            strays = 0
        elif other == number + 1 or number == NOT_BEGUN:
            number, strays = other, 0
            begun.append((start, number))
        elif strays + length >= LEAST_STRAYS:
            begun.append((start + LEAST_STRAYS - 1 - strays, other))
            number, strays = other, 0
        else:
            strays += length
    return begun, strays


def counts(current: Floats, factor: Factor) -> NDArray[np.bool_]:
    """Which strata [C] a cycle with these sums [C, H, ..] counts for."""
    requests = current[..., 0]
    enough: NDArray[np.bool_] = (requests.sum(axis=1) >= LEAST_REQUESTS) & (
        (requests > 0.0).sum(axis=1) >= factor.least_cells
    )
    return enough


def tallied(
    profile: Profile,
    stratum: NDArray[np.uint16],
    number: Ints,
    cell: Ints,
    residual: Floats,
    told: NDArray[np.bool_],
) -> Profile:
    """After T rows, of which those `told` are counted; a cycle that ends among them does not count."""
    begun, strays = cycles_begun(profile.number, profile.strays, number)
    if not begun and not told.any():
        return profile if strays == profile.strays else replace(profile, strays=strays)
    current = profile.current.copy()
    start, under_way = begun[-1] if begun else (0, profile.number)
    if begun:
        current[:] = 0.0
    own = start + np.flatnonzero(told[start:] & (number[start:] == under_way))
    place = 2 * (stratum[own].astype(np.int64) * profile.cells + cell[own])
    flat = current.reshape(-1)
    np.add.at(flat, place, 1.0)  # one after the other, so that batching changes no bit
    np.add.at(flat, place + 1, residual[own])
    return replace(profile, number=under_way, strays=strays, current=current)


def cycle_over(
    profile: Profile, factor: Factor, number: int, ignore: float
) -> tuple[Profile, NDArray[np.bool_]]:
    """When cycle `number` begins, and in which strata [C] a profile comes into use, is another after it had
    moved, or is given up."""
    before, over, counted = profile.used, profile.current, counts(profile.current, factor)
    profile = replace(profile, number=number, strays=0, current=np.zeros_like(over))
    if not counted.any():
        return profile, np.zeros(len(counted), dtype=np.bool_)
    profile = _but_for_one(profile, factor, over, counted)
    known = _with_cycle(profile, factor, profile.aside, _fits(profile, factor))
    shrunken, left, differ = _cells(known, factor, SMALLEST_DISAGREEMENT)
    effect, variance = _against_reference(profile.reference, shrunken, left)
    matters = differ & (amplitude(effect) > ignore)
    enough = known.cycles[:, 0] >= LEAST_CYCLES
    used, moved = known.used | (counted & matters & enough), profile.moved & ~enough
    after = _using(
        replace(profile, moved=moved),
        used,
        np.where(moved[:, None], profile.effect, effect),
        np.where(moved[:, None], profile.variance, variance),
    )
    return after, (used != before) | (profile.moved & enough)


def taken_as_usual(profile: Profile, factor: Factor, strata: NDArray[np.bool_], noise: Floats) -> Profile:
    """With what the cycles that are over say of these strata [C] in use, although they may be too few to be
    sure; unchanged where none is. `noise`: variance of one request [C], at least that of what one cycle says
    of a cell that has one."""
    least = np.maximum(noise, SMALLEST_DISAGREEMENT)[:, None]
    square, _ = _unlike(profile.totals, profile.aside, factor)
    # One that cannot be compared with those in the totals takes their place: only of two, the newest does.
    counts_too = np.isfinite(square) | (profile.cycles[:, 0] < LEAST_CYCLES)
    known = _with_cycle(profile, factor, profile.aside, profile.has_aside & counts_too)
    shrunken, left, _ = _cells(known, factor, least)
    effect, variance = _against_reference(profile.reference, shrunken, left)
    anew = strata & (profile.cycles[:, 0] >= 1.0) & (~profile.used | profile.moved)
    return _using(
        replace(profile, moved=profile.moved & ~anew),
        profile.used | anew,
        np.where(anew[:, None], effect, profile.effect),
        np.where(anew[:, None], variance, profile.variance),
    )


def _using(profile: Profile, used: NDArray[np.bool_], effect: Floats, variance: Floats) -> Profile:
    of_used = used[:, None]
    return replace(
        profile,
        used=used,
        effect=np.where(of_used, effect, 0.0),
        variance=np.where(of_used, variance, 0.0),
    )


def _but_for_one(profile: Profile, factor: Factor, over: Floats, counted: NDArray[np.bool_]) -> Profile:
    """With the cycle that is over, in the strata where it counts. The one that is least like the others is
    set aside from then on: the cycle that is over, the one that was set aside before, or the one in the
    totals where these hold a single one."""
    aside, several = profile.aside, counted & profile.has_aside
    of_newest, of_aside = (_unlike(profile.totals, one, factor)[0] for one in (over, aside))
    of_both = np.where(profile.cycles[:, 0] == 1, _unlike(_alone(aside), over, factor)[0], np.inf)
    of_others = np.minimum(of_newest, of_aside)
    first = several & (of_both < of_others)  # the one in the totals is set aside
    newest = several & ~first & (of_newest > of_aside)  # the one that is over is
    second = counted & ~several & (profile.cycles[:, 0] > 0)  # it is too, as none is yet
    after = replace(profile, totals=np.where(first[:, None, None], 0.0, profile.totals))
    after = _with_cycle(after, factor, aside, first | newest)
    after = _with_cycle(after, factor, over, counted & ~newest & ~second)
    # Totals that begin with what can be compared with those before give nothing up.
    used = after.used | (profile.used & first & np.isfinite(of_others))
    older = np.where(several[:, None, None], np.exp(-1.0 / factor.forgetting) * aside, aside)
    kept = np.where((newest | second)[:, None, None], over, older)
    kept = np.where(first[:, None, None], profile.totals[..., :2], kept)
    # What cannot be compared with those before has begun anew.
    begun = several & ~first & (after.cycles[:, 0] <= profile.cycles[:, 0])
    forgotten = begun[:, None] | (_sum(kept[..., 0]) < LEAST_SHARED)
    return replace(after, used=used, aside=np.where(forgotten[:, :, None], 0.0, kept))


def _rate(cycle: Floats) -> Floats:
    """Mean of r in each cell of a cycle [C, H, 2], or of c in one of totals [C, H, 3]; 0 without requests."""
    requests = cycle[..., 0]
    return np.asarray(cycle[..., 1] / np.where(requests > 0.0, requests, 1.0))


def _alone(cycle: Floats) -> Floats:
    """The totals [C, H, 3] of one cycle [C, H, 2]."""
    return np.dstack([cycle, cycle[..., 1] * _rate(cycle)])


def _unlike(totals: Floats, cycle: Floats, factor: Factor) -> tuple[Floats, Floats]:
    """(mean square [C] by which the cells of a cycle [C, H, 2] lie off those of the totals, its degrees of
    freedom), whatever the level of the cycle; infinite where they cannot be compared."""
    n, requests = totals[..., 0], cycle[..., 0]
    shared = n * requests > 0.0
    weight = np.where(shared, n * requests / np.where(shared, n + requests, 1.0), 0.0)
    off = _rate(cycle) - _rate(totals)
    off = off - _own_level(factor, weight, off)
    freedom = np.maximum(_sum(shared) - factor.lost, 1.0)
    enough = _sum(np.where(shared, requests, 0.0)) >= LEAST_SHARED
    return np.where(enough, _sum(weight * off**2) / freedom, np.inf)[:, 0], freedom[:, 0]


def _fits(profile: Profile, factor: Factor) -> NDArray[np.bool_]:
    """Whether the cycle set aside [C] disagrees with the others no more than they do with each other."""
    square, freedom = _unlike(profile.totals, profile.aside, factor)
    disagreement, left = _disagreement(profile, factor)
    ratio = square / np.maximum(disagreement[:, 0], SMALLEST_DISAGREEMENT)
    chance = _by_chance(ratio, freedom, left[:, 0])
    alone = profile.cycles[:, 0] < LEAST_CYCLES
    return np.asarray(profile.has_aside & np.isfinite(square) & (alone | (chance >= STANDS_OUT)))


def _disagreement(profile: Profile, factor: Factor) -> tuple[Floats, Floats]:
    """(mean square by which cycles disagree about cells, its degrees of freedom) [C, 1] each."""
    n, sums, squares = np.moveaxis(profile.totals, 2, 0)
    known = n > 0.0
    left = profile.cycles[:, 1:] - np.maximum(_sum(known) - factor.lost, 1.0)
    within = np.maximum(squares - sums**2 / np.where(known, n, 1.0), 0.0)
    return _sum(within) / np.maximum(left, 1.0), left


def _with_cycle(profile: Profile, factor: Factor, over: Floats, counted: NDArray[np.bool_]) -> Profile:
    """The totals with the cycle that is over, in the strata where it counts."""
    requests = over[..., 0]
    present, known = requests > 0.0, profile.totals[..., 0] > 0.0
    rate, so_far = _rate(over), _rate(profile.totals)
    shared = np.where(present & known, requests, 0.0)
    anew = _sum(shared) < LEAST_SHARED  # the first cycle, or one that cannot be compared with those before
    weight = np.where(anew, requests, shared)
    level = _own_level(factor, weight, rate - np.where(anew, 0.0, so_far))
    centred = np.where(present, rate - level, 0.0)
    kept = np.where(anew, 0.0, np.exp(-1.0 / factor.forgetting))
    added = np.stack([requests, requests * centred, requests * centred**2], axis=2)
    cycles = np.hstack(
        [
            np.where(anew, 0.0, profile.cycles[:, :1]) + 1.0,
            kept * profile.cycles[:, 1:] + np.maximum(_sum(present) - factor.lost, 0.0),
        ]
    )
    seen = np.minimum(np.where(anew, 0, profile.seen) + present, LEAST_CYCLES)
    return replace(
        profile,
        totals=np.where(counted[:, None, None], kept[:, :, None] * profile.totals + added, profile.totals),
        cycles=np.where(counted[:, None], cycles, profile.cycles),
        seen=np.where(counted[:, None], seen, profile.seen).astype(np.uint8),
        used=profile.used & ~(counted & anew[:, 0] & ~profile.moved),
    )


def seen_of(totals: Floats) -> NDArray[np.uint8]:
    """`Profile.seen` of totals [C, H, 3]: cycles disagree about a cell that several have seen, by more than
    rounding does."""
    n, sums, squares = np.moveaxis(totals, 2, 0)
    disagree = n * squares - sums**2 > SAME * n * squares
    return np.where(n > 0.0, np.where(disagree, LEAST_CYCLES, 1), 0).astype(np.uint8)


def _own_level(factor: Factor, weight: Floats, values: Floats) -> Floats:
    """a_d of a cycle: the weighted mean of values [C, H], or a weighted line through them in time."""
    total = np.maximum(_sum(weight), 1.0)
    mean = _sum(weight * values) / total
    if not factor.coarse:
        return mean
    time = np.arange(factor.cells) / factor.cells
    time = time - _sum(weight * time) / total
    spread = _sum(weight * time**2)
    slope = _sum(weight * time * values) / np.where(spread > 0.0, spread, 1.0)
    return np.asarray(mean + slope * time)


def _cells(
    profile: Profile, factor: Factor, least: float | Floats
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """(shrunken effects [C, H], their variances, whether cells differ [C]) from the totals. `least`: mean
    square of the disagreement, at least."""
    n, rate = profile.totals[..., 0], _rate(profile.totals)
    known = n > 0.0
    disagreement, left = _disagreement(profile, factor)
    disagreement = np.maximum(disagreement, least)
    if factor.coarse:
        rate = rate - _own_level(factor, known.astype(np.float64), rate)
    mean, between, cells = _between(factor, n, rate)
    enough = left >= np.maximum(factor.repeated * cells, 1.0)
    differ = enough & (_by_chance(between / disagreement, cells, left) < PROFILE_LEVEL)
    _, again, repeated = _between(factor, np.where(profile.seen >= LEAST_CYCLES, n, 0.0), rate)
    differ &= _by_chance(again / disagreement, repeated, left) < REPEATED_LEVEL
    total = np.maximum(_sum(n), 1.0)
    size = np.maximum((total - _sum(n**2) / total) / cells, 1.0)
    true = np.maximum(between - disagreement, 0.0) / size
    weight = np.where(known, true / (true + disagreement / np.where(known, n, 1.0)), 0.0)
    effect, variance = mean + weight * (rate - mean), true * (1.0 - weight)
    margin = variance + (_between_neighbours(effect, variance) if factor.coarse else 0.0)
    return effect, margin, differ[:, 0]


def _between(factor: Factor, n: Floats, rate: Floats) -> tuple[Floats, Floats, Floats]:
    """(weighted mean of the cells, mean square by which they differ, its degrees of freedom) [C, 1] each."""
    mean = _sum(n * rate) / np.maximum(_sum(n), 1.0)
    cells = np.maximum(_sum(n > 0.0) - factor.lost, 1.0)
    return mean, _sum(n * (rate - mean) ** 2) / cells, cells


def _by_chance(ratio: Floats, freedom: Floats, left: Floats) -> Floats:
    """Of an F test."""
    return np.asarray(fdtrc(freedom, np.maximum(left, 1.0), ratio))


def _between_neighbours(effect: Floats, variance: Floats) -> Floats:
    """[C, H] what two standard errors of it are what lies between each cell and those next to it."""
    apart = np.zeros_like(effect)
    for step in (-1, 1):
        squares = (effect - np.roll(effect, step, axis=1)) ** 2
        apart = np.maximum(apart, squares - variance - np.roll(variance, step, axis=1))
    return apart / 4.0


def _against_reference(reference: Floats, effect: Floats, variance: Floats) -> tuple[Floats, Floats]:
    """Effects [C, H] and variances of each cell less the mean of the reference period's cells."""
    share = reference / np.maximum(_sum(reference), 1.0)
    return (
        effect - _sum(share * effect),
        variance * (1.0 - 2.0 * share) + _sum(share**2 * variance),
    )


def _sum(values: Floats | NDArray[np.bool_]) -> Floats:
    """Over the cells, one after the other: numpy's sum may add in another order for another C. [C, 1]"""
    total: Floats = np.add.accumulate(values, axis=1, dtype=np.float64)[:, -1:]
    return total
