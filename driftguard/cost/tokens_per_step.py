"""Expected tokens per step at any K, from what was accepted at the K in use.

A step keeps draft tokens up to the first rejection and adds one of the target's own, so with c_i the
probability that position i is accepted given that position i - 1 was,

    L(K) = 1 + c_1 + c_1 c_2 + ... + c_1 c_2 ... c_K

c_i = (steps that accepted position i) / (steps that accepted position i - 1), over requests with K >= i.
Beyond the last position with enough requests, that position's c_i is carried on. Where the records do not
tell positions, every c_i is the one a whose a + ... + a^K is the measured number of accepted tokens per step:
then L(K) = (1 - a^(K+1)) / (1 - a) (Leviathan, Kalman, Matias 2023, "Fast inference from transformers via
speculative decoding", eq. 1, whose assumption is that tokens are accepted alike and independently). a is not
the acceptance rate: accepted / drafted counts positions behind a rejection too, as drafted and not accepted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from driftguard.cost.times import LEAST_REQUESTS, Floats, Sample

_HALVINGS = 60


@dataclass(frozen=True, slots=True, eq=False)
class Chain:
    """c_i of each position told by N requests, and each request's part in its error."""

    accepts: Floats  # [P], P >= 1
    influence: Floats  # [N, P]
    per_position: bool  # measured at each position, not one value for all

    def tokens(self, k: int) -> tuple[float, Floats]:
        """(L(K), the requests' part in the error of log L(K) [N])."""
        total, reached = 1.0, 1.0
        total_influence = np.zeros(len(self.influence))
        reached_influence = np.zeros(len(self.influence))
        for i in range(k):
            place = min(i, len(self.accepts) - 1)
            accept = float(self.accepts[place])
            reached_influence = reached_influence * accept + reached * self.influence[:, place]
            reached *= accept
            total += reached
            total_influence = total_influence + reached_influence
        return total, total_influence / total


def chain_of(sample: Sample, k: int) -> Chain:
    """From requests of which at least some have this K > 0."""
    told = ~np.isnan(sample.positions[:, 0]) if sample.positions.shape[1] else np.zeros(len(sample), bool)
    enough = [int((told & (sample.k > i)).sum()) >= LEAST_REQUESTS for i in range(sample.positions.shape[1])]
    places = enough.index(False) if False in enough else len(enough)
    return _measured(sample, places) if places else _alike(sample, k)


def _measured(sample: Sample, places: int) -> Chain:
    told = ~np.isnan(sample.positions[:, 0])
    accepts = np.zeros(places)
    influence = np.zeros((len(sample), places))
    before = sample.steps
    for i in range(places):
        chosen = told & (sample.k > i)
        reached, kept = np.where(chosen, before, 0.0), np.where(chosen, sample.positions[:, i], 0.0)
        if reached.sum() == 0.0:
            break  # nothing was ever accepted so far
        accepts[i] = min(kept.sum() / reached.sum(), 1.0)
        influence[:, i] = (kept - accepts[i] * reached) / reached.sum()
        before = sample.positions[:, i]
    return Chain(accepts, influence, per_position=True)


def _alike(sample: Sample, k: int) -> Chain:
    chosen = sample.k == k
    steps, accepted = np.where(chosen, sample.steps, 0.0), np.where(chosen, sample.accepted, 0.0)
    per_step = min(accepted.sum() / steps.sum(), float(k))
    powers = np.arange(1, k + 1)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        low, high = (middle, high) if (middle**powers).sum() < per_step else (low, middle)
    slope = float((powers * high ** (powers - 1)).sum())
    influence = (accepted - per_step * steps) / steps.sum() / slope
    return Chain(np.array([high]), influence[:, None], per_position=False)
