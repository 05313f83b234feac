"""What the place of a request in its session says: its turn, and how far the session has wandered.

The turn is how many requests the session had before (0 for the first). In a session acceptance may fall (or
rise) as it goes on, because its context grows. What turn n adds to the mean of a stratum is taken to be
linear between KNOTS, and constant beyond the last:

    g(n) = sum over k of step_k r_k(n),  r_k(n) in [0, 1] the part of the way from knot k to knot k + 1

And a session may wander in a way of its own: another subject, or text that suits the draft less and less.
Then its next request is like its newest ones rather than like all of them: it lies b v above the mean of all,
v how far the mean of its newest requests, each weighted by REMEMBERED of the next (`sessions.py`), lies above
that.

Both are learned inside sessions, so that how they differ does not matter: x is held against the mean of the
earlier x of its session, weighted so that the contrasts of a session that does not wander are independent
(Helmert), each with the variance w inside sessions:

    y = (n / (n + 1))^(1/2) (x - mean of the earlier x),  z_k the same of r_k, and z of v likewise

With normal coefficients of standard deviations USUAL these give, for the terms of a model, the posterior

    V = (sum z z' / w + diag(USUAL^-2))^-1,  mean = V sum z y / w

and, against "nothing matters", the odds that the turn, the wandering or both do: those of MODELS times
(det V / prod USUAL^2)^(1/2) exp(mean' V^-1 mean / 2). What is expected of a request (`expectation.py`) is the
mean over all models. So in a young stream turns that were hardly seen have a wide margin; where sessions have
shown that they do not follow the turn there is none, and where they do it is what V leaves.

What is learned from must not be of a change. Contrasts from before there is a baseline count at once, because
they are of it; where it is that of the part before a fall they are forgotten. The newest ones wait for two
measurements of the dependence (`dependence.py`), and are dropped where there is evidence or an incident by
then.

Assumptions: turns act alike in all sessions of a stratum, and add up with the session's own effect; one b
does for all sessions and turns of a stratum. v is of x as it is, whatever the lengths. A session that was
open before the stream began, or was dropped from the table, counts from 0.
Papers: Searle, Casella, McCulloch, Variance Components (1992); Kass, Raftery 1995 (Bayes factors); Hoeting,
Madigan, Raftery, Volinsky 1999 (Bayesian model averaging).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import softmax

from driftguard.detection.statistics.bets import SMALLEST_VARIANCE

Floats = NDArray[np.float64]

KNOTS: Floats = np.array([0.0, 1.0, 4.0, 16.0, 64.0, 256.0])
WIDTHS: Floats = np.diff(KNOTS)
STEPS = len(WIDTHS)
USUAL_STEP = 0.03  # of acceptance
USUAL_PULL = 1.0  # b
TERMS = STEPS + 1  # the steps, then v
USUAL: Floats = np.array([USUAL_STEP] * STEPS + [USUAL_PULL])
ODDS = 0.25  # that the turn matters, or the wandering, before anything is seen of them
MODELS = (slice(0, STEPS), ODDS), (slice(STEPS, TERMS), ODDS), (slice(0, TERMS), ODDS**2)
PAIRS = np.triu_indices(TERMS)
LEVEL = 1 + STEPS  # sums over requests that name their session: how many, r
# the same; over their contrasts z z', z y, z times the contrast of log length
OF_TURNS = LEVEL + len(PAIRS[0]) + 2 * TERMS
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
    z = np.empty((len(n), TERMS))
    z[:, :STEPS] = progress(n) - progress_before(n) / earlier[:, None]
    z[:, STEPS] = wandered(before)
    z *= weight[:, None]
    y = weight * (x - before[:, 1] / earlier)
    length = weight * (log_length - before[:, 2] / earlier)
    parts = z[:, PAIRS[0]] * z[:, PAIRS[1]], z * y[:, None], z * length[:, None]
    return np.hstack([level_terms(n, np.ones(len(n), dtype=np.bool_)), *parts])


def wandered(before: Floats) -> Floats:
    """v [T] of sessions [T, KNOWN]."""
    of_all, of_newest = (
        before[:, 1] / np.maximum(before[:, 0], 1.0),
        before[:, 5] / np.maximum(before[:, 4], 1.0),
    )
    return np.asarray(of_newest - of_all)


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


def with_wandering(sums: Floats) -> Floats:
    """The sums [C, KEPT, OF_TURNS] from those of a state that did not know that sessions wander: their
    contrasts are of the steps only."""
    first, second = np.triu_indices(STEPS)
    places = np.full((TERMS, TERMS), -1)
    places[PAIRS] = LEVEL + np.arange(len(PAIRS[0]))
    products = OF_TURNS - 2 * TERMS + np.arange(STEPS)
    known = [np.arange(LEVEL), places[first, second], products, products + TERMS]
    after = np.zeros((*sums.shape[:2], OF_TURNS))
    after[:, :, np.concatenate(known)] = sums
    return after


@dataclass(frozen=True, slots=True)
class _Posterior:
    """Of the coefficients of a model's terms."""

    terms: slice
    mean: Floats  # [C, k]
    variance: Floats  # [C, k, k] V
    log_odds: Floats  # [C] against "nothing matters"

    @classmethod
    def of(cls, terms: slice, odds: float, squares: Floats, products: Floats) -> _Posterior:
        """From sum z z' / w [C, TERMS, TERMS] and sum z y / w [C, TERMS]."""
        usual, products = USUAL[terms], products[:, terms]
        variance = np.asarray(np.linalg.inv(squares[:, terms, terms] + np.diag(usual**-2.0)))
        mean = _sum(variance * products[:, None, :])
        told = _sum(products * mean) + np.linalg.slogdet(variance / np.outer(usual, usual))[1]
        return cls(terms, mean, variance, math.log(odds) + told / 2.0)

    def effect(self, own: NDArray[np.intp], z: Floats) -> tuple[Floats, Floats]:
        """(expectation, variance) of what z [T, TERMS] add, of requests of these strata [T]."""
        z = z[:, self.terms]
        squares = z[:, :, None] * self.variance[own] * z[:, None, :]
        return _sum(z * self.mean[own]), np.maximum(_sum(squares.reshape(len(z), -1)), 0.0)


@dataclass(frozen=True, slots=True)
class Turns:
    """What is known of C strata."""

    posteriors: tuple[_Posterior, ...]
    middle: Floats  # [C, STEPS] mean of r in the reference period

    @classmethod
    def of(cls, sums: Floats, within: Floats, slope: Floats) -> Turns:
        """From sums [C, KEPT, OF_TURNS], the variance w and the slope of x on log length [C]."""
        learned, w = sums[:, LEARNED], np.maximum(within, SMALLEST_VARIANCE)[:, None]
        squares = np.empty((len(sums), TERMS, TERMS))
        squares[:, PAIRS[0], PAIRS[1]] = squares[:, PAIRS[1], PAIRS[0]] = learned[:, LEVEL : -2 * TERMS]
        of_x, of_length = learned[:, -2 * TERMS : -TERMS], learned[:, -TERMS:]
        products = (of_x - slope[:, None] * of_length) / w
        posteriors = (_Posterior.of(terms, odds, squares / w[:, :, None], products) for terms, odds in MODELS)
        return cls(tuple(posteriors), _middle(sums))

    def effect(self, own: NDArray[np.intp], before: Floats, weight: Floats) -> tuple[Floats, Floats]:
        """What the places in their sessions of requests of these strata [T] add to what is expected, and the
        standard error of that, from their sessions before them [T, KNOWN]; the mean of the session's earlier
        requests counts with `weight` [T]."""
        n = before[:, 0]
        earlier = progress_before(n) / np.maximum(n, 1.0)[:, None]
        z = np.empty((len(n), TERMS))
        z[:, :STEPS] = progress(n) - self.middle[own] - weight[:, None] * (earlier - self.middle[own])
        z[:, STEPS] = wandered(before)
        none = np.zeros(len(n))
        means, variances = zip((none, none), *(one.effect(own, z) for one in self.posteriors), strict=True)
        likely = softmax([none, *(one.log_odds[own] for one in self.posteriors)], axis=0)
        effect = np.add.accumulate(likely * means)[-1]
        spread = np.add.accumulate(likely * (np.array(variances) + (np.array(means) - effect) ** 2))[-1]
        return effect, np.sqrt(spread)


def _middle(sums: Floats) -> Floats:
    """States of before do not know it of their reference periods: there it is that of what came since."""
    known = sums[:, REFERENCE, :1] > 0.0
    level = np.where(known, sums[:, REFERENCE, :LEVEL], sums[:, LEARNED, :LEVEL])
    return np.asarray(level[:, 1:] / np.maximum(level[:, :1], 1.0))


def _sum(values: Floats) -> Floats:
    """Over the last axis, one after the other, so that the number of rows changes no bit."""
    total: Floats = np.add.accumulate(values, axis=-1)[..., -1]
    return total
