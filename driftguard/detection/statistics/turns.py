"""Acceptance that follows the turn: how many requests its session had before (0 for the first).

In a session acceptance may fall (or rise) as it goes on, because its context grows. What turn n adds to the
mean of a stratum is taken to be linear between KNOTS, and constant beyond the last:

    g(n) = sum over k of step_k r_k(n),  r_k(n) in [0, 1] the part of the way from knot k to knot k + 1

It is learned inside sessions, so that how they differ does not matter: x is held against the mean of the
earlier x of its session, weighted so that the contrasts of a session are independent (Helmert), each with the
variance w inside sessions:

    y = (n / (n + 1))^(1/2) (x - mean of the earlier x),  z_k the same of r_k

With normal steps of standard deviation USUAL_STEP these give the posterior

    V = (sum z z' / w + I / USUAL_STEP^2)^-1,  step = V sum z y / w

and, against "no turn matters", the odds ODDS (det V / USUAL_STEP^(2 K))^(1/2) exp(step' V^-1 step / 2) that
it does. What is expected of a request (`expectation.py`) is the mean over both. So in a young stream turns
that were hardly seen have a wide margin; where sessions have shown that they do not follow the turn there is
none, and where they do it is what V leaves.

What is learned from must not be of a change. Contrasts from before there is a baseline count at once, because
they are of it. The newest ones wait for two measurements of the dependence
(`dependence.py`), and are dropped where there is evidence or an incident by then.

Assumptions: turns act alike in all sessions of a stratum, and add up with the session's own effect. A session
that was open before the stream began, or was dropped from the table, counts from 0.
Papers: Searle, Casella, McCulloch, Variance Components (1992); Kass, Raftery 1995 (Bayes factors).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import expit

from driftguard.detection.statistics.bets import SMALLEST_VARIANCE

Floats = NDArray[np.float64]

KNOTS: Floats = np.array([0.0, 1.0, 4.0, 16.0, 64.0, 256.0])
WIDTHS: Floats = np.diff(KNOTS)
STEPS = len(WIDTHS)
USUAL_STEP = 0.03  # of acceptance
ODDS = 0.25  # that the turn matters, before anything is seen of it
PAIRS = np.triu_indices(STEPS)
LEVEL = 1 + STEPS  # sums over requests that name their session: how many, r
# the same; over their contrasts z z', z y, z times the contrast of log length
OF_TURNS = LEVEL + len(PAIRS[0]) + 2 * STEPS
# Sums of a stratum: of its reference period (LEVEL only), those learned from, those that wait, the newest
REFERENCE, LEARNED, WAITING, NEWEST = range(4)
KEPT = 4


def progress(turn: Floats) -> Floats:
    """r [T, STEPS]."""
    return np.asarray(np.clip((turn[:, None] - KNOTS[:-1]) / WIDTHS, 0.0, 1.0))


def progress_before(turn: Floats) -> Floats:
    """The sum of r over the turns before [T, STEPS]."""
    last = turn[:, None] - 1.0 - KNOTS[:-1]
    inside = np.clip(last, 0.0, WIDTHS)
    return np.asarray(inside * (inside + 1.0) / (2.0 * WIDTHS) + np.maximum(last - WIDTHS, 0.0))


def level_terms(turn: Floats, named: NDArray[np.bool_]) -> Floats:
    """What each of T requests adds to the sums over those that name their session [T, LEVEL]."""
    return np.where(named[:, None], np.hstack([np.ones((len(turn), 1)), progress(turn)]), 0.0)


def turn_terms(before: Floats, x: Floats, log_length: Floats) -> Floats:
    """What each of T requests of sessions adds to the sums [T, OF_TURNS]; `before` [T, KNOWN] as in
    sessions.py."""
    n = before[:, 0]
    earlier, weight = np.maximum(n, 1.0), np.sqrt(n / (n + 1.0))
    z = weight[:, None] * (progress(n) - progress_before(n) / earlier[:, None])
    y = weight * (x - before[:, 1] / earlier)
    length = weight * (log_length - before[:, 2] / earlier)
    parts = z[:, PAIRS[0]] * z[:, PAIRS[1]], z * y[:, None], z * length[:, None]
    return np.hstack([level_terms(n, np.ones(len(n), dtype=np.bool_)), *parts])


def looked_at(sums: Floats, doubtful: NDArray[np.bool_]) -> Floats:
    """The sums [C, KEPT, OF_TURNS] when what waited is learned from, but where a change is likely [C]."""
    lost, after = doubtful[:, None], sums.copy()
    after[:, LEARNED] += np.where(lost, 0.0, sums[:, WAITING])
    after[:, WAITING] = np.where(lost, 0.0, sums[:, NEWEST])
    after[:, NEWEST] = 0.0
    return after


def without_newest(sums: Floats) -> Floats:
    """The sums without what has not been learned from yet."""
    after = sums.copy()
    after[:, WAITING:] = 0.0
    return after


def without_learned(sums: Floats, strata: NDArray[np.bool_]) -> Floats:
    """The sums that have learned nothing of these strata [C] since their reference periods."""
    after = sums.copy()
    after[strata, LEARNED:] = 0.0
    return after


@dataclass(frozen=True, slots=True)
class Turns:
    """What is known of C strata."""

    steps: Floats  # [C, STEPS]
    variance: Floats  # [C, STEPS, STEPS] V
    likely: Floats  # [C] that turns matter
    middle: Floats  # [C, STEPS] mean of r in the reference period

    @classmethod
    def of(cls, sums: Floats, within: Floats, slope: Floats) -> Turns:
        """From sums [C, KEPT, OF_TURNS], the variance w and the slope of x on log length [C]."""
        learned, w = sums[:, LEARNED], np.maximum(within, SMALLEST_VARIANCE)[:, None]
        squares = np.empty((len(sums), STEPS, STEPS))
        squares[:, PAIRS[0], PAIRS[1]] = squares[:, PAIRS[1], PAIRS[0]] = learned[:, LEVEL : -2 * STEPS]
        of_x, of_length = learned[:, -2 * STEPS : -STEPS], learned[:, -STEPS:]
        products = (of_x - slope[:, None] * of_length) / w
        variance = np.linalg.inv(squares / w[:, :, None] + np.eye(STEPS) / USUAL_STEP**2)
        steps = _sum(variance * products[:, None, :])
        told = _sum(products * steps) + np.linalg.slogdet(variance / USUAL_STEP**2)[1]
        likely: Floats = expit(math.log(ODDS) + told / 2.0)
        return cls(steps, np.asarray(variance), likely, _middle(sums))

    def effect(self, own: NDArray[np.intp], n: Floats, weight: Floats) -> tuple[Floats, Floats]:
        """What the turns n [T] of requests of these strata [T] add to what is expected, and the standard
        error of that; the mean of the session's earlier requests counts with `weight` [T]."""
        earlier = progress_before(n) / np.maximum(n, 1.0)[:, None]
        apart = progress(n) - self.middle[own]
        apart -= weight[:, None] * (earlier - self.middle[own])
        effect, likely = _sum(apart * self.steps[own]), self.likely[own]
        squares = apart[:, :, None] * self.variance[own] * apart[:, None, :]
        left = np.maximum(_sum(squares.reshape(len(n), -1)), 0.0)
        return likely * effect, np.sqrt(likely * (left + (1.0 - likely) * effect**2))


def _middle(sums: Floats) -> Floats:
    """States of before do not know it of their reference periods: there it is that of what came since."""
    known = sums[:, REFERENCE, :1] > 0.0
    level = np.where(known, sums[:, REFERENCE, :LEVEL], sums[:, LEARNED, :LEVEL])
    return np.asarray(level[:, 1:] / np.maximum(level[:, :1], 1.0))


def _sum(values: Floats) -> Floats:
    """Over the last axis, one after the other, so that the number of rows changes no bit."""
    total: Floats = np.add.accumulate(values, axis=-1)[..., -1]
    return total
