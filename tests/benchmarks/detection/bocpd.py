"""Bayesian online change point detection (Adams & MacKay 2007), Gaussian with unknown mean.

x | run ~ N(mu, v), mu ~ N(m, .15^2) for every run, hazard 1/20,000; m and v are the mean and variance of
the reference period. The statistic is the log odds of "a run began since the reference period" to "none
did". Many streams are filtered at once. The posterior keeps the run that goes back to the reference
period, and the RUNS - 1 heaviest others.
"""

from __future__ import annotations

import math

import numpy as np

from tests.benchmarks.detection.traffic import Floats

RUNS = 96
HAZARD = 1.0 / 20_000.0
PRIOR_SPREAD = 0.15


def log_odds(x: Floats, reference: int) -> Floats:
    """x [S, N] of S streams -> log odds [S, N], minus infinity within the reference period."""
    streams, n = x.shape
    start = x[:, :reference].mean(axis=1, keepdims=True)
    noise = x[:, :reference].var(axis=1, ddof=1, keepdims=True)
    prior_weight = noise / PRIOR_SPREAD**2  # requests that the prior counts for
    weight = np.full((streams, RUNS), -np.inf)  # log weight of every run
    weight[:, 0] = 0.0
    count = np.tile(prior_weight, (1, RUNS))
    total = np.tile(prior_weight * start, (1, RUNS))
    count[:, :1] += reference
    total[:, :1] += reference * start
    odds = np.full((streams, n), -np.inf)
    every = np.arange(streams)
    for t in range(reference, n):
        now = x[:, t : t + 1]
        variance = noise * (1.0 + 1.0 / count)
        weight -= (now - total / count) ** 2 / (2.0 * variance) + 0.5 * np.log(variance)
        count += 1.0
        total += now
        peak = weight.max(axis=1)
        everything = peak + np.log(np.exp(weight - peak[:, None]).sum(axis=1))
        weight += math.log1p(-HAZARD) - everything[:, None]
        lightest = weight[:, 1:].argmin(axis=1) + 1
        weight[every, lightest] = math.log(HAZARD)
        count[every, lightest] = prior_weight[:, 0]
        total[every, lightest] = prior_weight[:, 0] * start[:, 0]
        # 1 - w0 would lose its digits where w0 is near 1, so the others are summed.
        others = weight[:, 1:].max(axis=1)
        rest = others + np.log(np.exp(weight[:, 1:] - others[:, None]).sum(axis=1))
        odds[:, t] = rest - weight[:, 0]
    return odds
