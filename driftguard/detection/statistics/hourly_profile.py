"""Acceptance that depends on the hour of day: learned from days, without learning a drift.

Per stratum and hour of day h (UTC), residuals r around the line (`baseline.py`) are averaged over the
requests of one day. A day d that is over is compared with itself only:

    c_dh = r_dh - a_d,  a_d = mean over h of r_dh - g_h, weighted by requests

with g_h what is known of the hours so far (on the first day: 0), so that neither the day's level nor the
hours that it happens to have matter. g_h is the mean of c_dh over days, weighted by requests and by
exp(-age / FORGETTING_DAYS). The level stays what the reference period said: a request of hour h is expected
at the line + g_h - the mean of g over the hours of the reference period's own requests. A slow decline
moves every day's a_d and no g_h, so it is not learned; what it does within a day is learned, a sawtooth of
half a day's decline.

Used from LEAST_DAYS days on, once the F test of the two-way layout hours x days says at RHYTHM_LEVEL that
hours differ by more than days disagree about them, and the hours lie further apart than what is to be
ignored; from then on every day's end brings it up to date.
Hours are shrunken to their mean by empirical Bayes, g_h = g + t / (t + s / N_h) (c_h - g), with s the mean
square of the disagreement, N_h the weight of the hour and t the variance between hours by moments. The
variance that is left, t s / (t N_h + s), goes into the margin of every request (`expectation.py`); an hour
never seen is expected at the mean of the hours, with variance t.
A day counts when it has LEAST_REQUESTS requests in LEAST_HOURS hours. One with fewer than LEAST_SHARED
requests in hours known before cannot be compared with the days before: what was learned is given up.
Until a rhythm is used it raises alarms, as nothing tells it from a change before days have passed; days
with incidents therefore count. After that, requests of segments with an open incident do not, so that a
step within a day is not taken for hours. A rhythm that changes so much that it raises alarms again is
learned anew with an accepted new normal.
Assumptions: hours act on acceptance in the same way every day, up to slow changes; days disagree
independently.
Papers: Scheffe, The Analysis of Variance (1959), chapter 4; Morris 1983 (empirical Bayes).
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtrc

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

HOURS = 24
NO_DAY = -(2**31)
LEAST_DAYS = 2
LEAST_HOURS = 6
LEAST_REQUESTS = 100.0
LEAST_SHARED = 50.0  # requests of a day in hours that are known, to tell its level
LEAST_STRAYS = 100
FORGETTING_DAYS = 14.0
RHYTHM_LEVEL = 1e-3
_KEPT = float(np.exp(-1.0 / FORGETTING_DAYS))
SMALLEST_DISAGREEMENT = 1e-9


@dataclass(frozen=True, slots=True, eq=False)
class Rhythms:
    """What is known of the hours of day in each of C strata."""

    day: int  # under way: days since 1970 UTC
    strays: int  # rows since the last one of this day
    today: Floats  # [C, HOURS, 2] requests, sum of r
    totals: Floats  # [C, HOURS, 3] over earlier days, weighted by age: requests N, N c, N c^2
    days: Floats  # [C, 2] that counted; sum of (their hours - 1), weighted by age
    reference: Floats  # [C, HOURS] requests of the reference period
    used: NDArray[np.bool_]  # [C]
    effect: Floats  # [C, HOURS] what is added to the line; 0 unless used
    variance: Floats  # [C, HOURS] of the effect

    @classmethod
    def none(cls, strata: int = 0) -> Rhythms:
        hours = np.zeros((strata, HOURS))
        return cls(
            day=NO_DAY,
            strays=0,
            today=np.zeros((strata, HOURS, 2)),
            totals=np.zeros((strata, HOURS, 3)),
            days=np.zeros((strata, 2)),
            reference=hours,
            used=np.zeros(strata, dtype=np.bool_),
            effect=hours,
            variance=hours,
        )

    @property
    def amplitude(self) -> Floats:
        """Of each stratum's rhythm [C]; 0 unless used."""
        return amplitude(self.effect)

    def counted(self, today: Floats, *, strays: int) -> Rhythms:
        """With these sums of the day under way."""
        rest = self.totals, self.days, self.reference, self.used, self.effect, self.variance
        return Rhythms(self.day, strays, today, *rest)

    def followed_by(self, strata: int) -> Rhythms:
        """With a row for each of so many new strata."""
        return self._joined(Rhythms.none(strata), np.concatenate)

    def without(self, forgotten: NDArray[np.bool_]) -> Rhythms:
        """With nothing known of the strata [C] that are `forgotten`."""

        def keep(pair: list[NDArray[Any]]) -> NDArray[Any]:
            return np.where(forgotten.reshape(-1, *[1] * (pair[0].ndim - 1)), pair[1], pair[0])

        return self._joined(Rhythms.none(len(forgotten)), keep)

    def _joined(self, other: Rhythms, join: Any) -> Rhythms:
        columns = [item.name for item in fields(self) if item.name not in ("day", "strays")]
        return replace(self, **{name: join([getattr(self, name), getattr(other, name)]) for name in columns})


def amplitude(effect: Floats) -> Floats:
    """Half of what lies between the best and the worst hour [C]."""
    half: Floats = (effect.max(axis=1) - effect.min(axis=1)) / 2.0
    return half


def days_begun(day: int, strays: int, days: Ints) -> tuple[list[tuple[int, int]], int]:
    """(place, day) where another day begins among rows of `days` [T], and the strays after them.

    The next day begins with its first row. Rows of any other day are strays: late, or of a wrong clock.
    Their day begins once LEAST_STRAYS rows in a row were not of the day under way.
    """
    begun: list[tuple[int, int]] = []
    starts = np.flatnonzero(np.diff(days, prepend=days[:1] - 1))  # of runs of one day
    lengths = np.diff(starts, append=len(days))
    for start, length, other in zip(starts.tolist(), lengths.tolist(), days[starts].tolist(), strict=True):
        if other == day:
            strays = 0
        elif other == day + 1 or day == NO_DAY:
            day, strays = other, 0
            begun.append((start, day))
        elif strays + length >= LEAST_STRAYS:
            begun.append((start + LEAST_STRAYS - 1 - strays, other))
            day, strays = other, 0
        else:
            strays += length
    return begun, strays


def counts(today: Floats) -> NDArray[np.bool_]:
    """Which strata [C] a day with these sums [C, HOURS, ..] counts for."""
    requests = today[..., 0]
    enough: NDArray[np.bool_] = (requests.sum(axis=1) >= LEAST_REQUESTS) & (
        (requests > 0.0).sum(axis=1) >= LEAST_HOURS
    )
    return enough


def tallied(
    rhythms: Rhythms,
    stratum: NDArray[np.uint16],
    day: Ints,
    hour: Ints,
    residual: Floats,
    told: NDArray[np.bool_],
) -> Rhythms:
    """After T rows, of which those `told` are counted; a day that ends among them is not one that counts."""
    today = rhythms.today.copy()
    begun, strays = days_begun(rhythms.day, rhythms.strays, day)
    start, current = begun[-1] if begun else (0, rhythms.day)
    if begun:
        today[:] = 0.0
    own = start + np.flatnonzero(told[start:] & (day[start:] == current))
    cell = 2 * (stratum[own].astype(np.int64) * HOURS + hour[own])
    flat = today.reshape(-1)
    np.add.at(flat, cell, 1.0)  # one after the other, so that batching changes no bit
    np.add.at(flat, cell + 1, residual[own])
    return replace(rhythms, day=current, strays=strays, today=today)


def day_over(rhythms: Rhythms, day: int, ignore: float) -> tuple[Rhythms, NDArray[np.bool_]]:
    """When `day` begins, and in which strata [C] a rhythm comes into use or is given up."""
    before, over, counted = rhythms.used, rhythms.today, counts(rhythms.today)
    rhythms = replace(rhythms, day=day, strays=0, today=np.zeros_like(over))
    if not counted.any():
        return rhythms, np.zeros(len(counted), dtype=np.bool_)
    rhythms = _with_day(rhythms, over, counted)
    shrunken, left, differ = _hours(rhythms)
    effect, variance = _against_reference(rhythms.reference, shrunken, left)
    matters = differ & (amplitude(effect) > ignore)
    used = rhythms.used | (counted & matters & (rhythms.days[:, 0] >= LEAST_DAYS))
    of_used = used[:, None]
    learned = replace(
        rhythms,
        used=used,
        effect=np.where(of_used, effect, 0.0),
        variance=np.where(of_used, variance, 0.0),
    )
    return learned, used != before


def _with_day(rhythms: Rhythms, over: Floats, counted: NDArray[np.bool_]) -> Rhythms:
    """The totals with the day that is over, in the strata where it counts."""
    requests = over[..., 0]
    present, known = requests > 0.0, rhythms.totals[..., 0] > 0.0
    rate = over[..., 1] / np.maximum(requests, 1.0)
    so_far = rhythms.totals[..., 1] / np.where(known, rhythms.totals[..., 0], 1.0)
    shared = np.where(present & known, requests, 0.0)
    anew = _sum(shared) < LEAST_SHARED  # the first day, or one that cannot be compared with those before
    weight = np.where(anew, requests, shared)
    level = _sum(weight * (rate - np.where(anew, 0.0, so_far))) / np.maximum(_sum(weight), 1.0)
    centred = np.where(present, rate - level, 0.0)
    kept = np.where(anew, 0.0, _KEPT)
    added = np.stack([requests, requests * centred, requests * centred**2], axis=2)
    days = np.hstack(
        [np.where(anew, 0.0, rhythms.days[:, :1]) + 1.0, kept * rhythms.days[:, 1:] + _sum(present) - 1.0]
    )
    return replace(
        rhythms,
        totals=np.where(counted[:, None, None], kept[:, :, None] * rhythms.totals + added, rhythms.totals),
        days=np.where(counted[:, None], days, rhythms.days),
        used=rhythms.used & ~(counted & anew[:, 0]),
    )


def _hours(rhythms: Rhythms) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """(shrunken effects [C, HOURS], their variances, whether hours differ [C]) from the totals."""
    n, sums, squares = np.moveaxis(rhythms.totals, 2, 0)
    known = n > 0.0
    each, total = np.where(known, n, 1.0), np.maximum(_sum(n), 1.0)
    hours = np.maximum(_sum(known) - 1.0, 1.0)  # degrees of freedom, [C, 1] as all that follow
    left = rhythms.days[:, 1:] - hours
    rate, mean = sums / each, _sum(sums) / total
    between = _sum(n * (rate - mean) ** 2) / hours
    disagreement = _sum(np.maximum(squares - sums * rate, 0.0)) / np.maximum(left, 1.0)
    disagreement = np.maximum(disagreement, SMALLEST_DISAGREEMENT)
    chance = fdtrc(hours, np.maximum(left, 1.0), between / disagreement)
    differ: NDArray[np.bool_] = ((left >= 1.0) & (chance < RHYTHM_LEVEL))[:, 0]
    size = np.maximum((total - _sum(n**2) / total) / hours, 1.0)
    true = np.maximum(between - disagreement, 0.0) / size
    weight = np.where(known, true / (true + disagreement / each), 0.0)
    return mean + weight * (rate - mean), true * (1.0 - weight), differ


def _against_reference(reference: Floats, effect: Floats, variance: Floats) -> tuple[Floats, Floats]:
    """Effects [C, HOURS] and variances of each hour less the mean of the reference period's hours."""
    share = reference / np.maximum(_sum(reference), 1.0)
    return (
        effect - _sum(share * effect),
        variance * (1.0 - 2.0 * share) + _sum(share**2 * variance),
    )


def _sum(values: Floats | NDArray[np.bool_]) -> Floats:
    """Over the hours, one after the other: numpy's sum may add in another order for another C. [C, 1]"""
    total: Floats = np.add.accumulate(values, axis=1, dtype=np.float64)[:, -1:]
    return total
