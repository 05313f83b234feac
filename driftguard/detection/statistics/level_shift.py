"""Did acceptance change while a reference period was under way?

The requests of a reference period are kept as sums over bins that follow each other, which become larger as
it goes on: at most BINS of them, each of SMALLEST_BIN x 2^k requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from driftguard.detection.statistics.baseline import (
    LL,
    LX,
    REQUESTS,
    SUMS,
    Floats,
    L,
    X,
    add_terms,
    length_of_acceptance,
)

BINS = 32
SMALLEST_BIN = 8
OF_BIN = SUMS + 1  # the sums of `baseline.py`, and the ordinal of the bin's last request
LEAST_BINS = 12
LEAST_PART = 2  # bins on either side of a shift
# With LEAST_BINS independent bins a scan exceeds it in 3 of 10,000; with 16 and more in 1 to 1.5
CRITICAL = 206.0
SMALLEST = 1e-12


@dataclass(frozen=True, slots=True, eq=False)
class LevelShift:
    """The mean of the bins from `bin` on (the change may lie in the one before it) against those before."""

    bin: int
    gap: float  # per request; below 0 for a fall
    residuals: Floats  # [M] of each whole bin, the sum of what its requests lie above the level of their side


def bin_size(requests: int) -> int:
    """Of each of the bins that hold so many requests together; the last one may hold fewer."""
    size = SMALLEST_BIN
    while size * BINS <= requests:
        size *= 2
    return size


def add_to_bins(bins: Floats, before: int, added: Floats, ordinals: Floats) -> Floats:
    """Bins [BINS, OF_BIN] of `before` requests, and T more: their terms [T, SUMS] and ordinals [T].

    One after the other, so that batching changes no bit.
    """
    after, done = bins.copy(), 0
    while done < len(added):
        size = bin_size(before)
        place, filled = divmod(before, size)
        some = slice(done, done + size - filled)
        after[place, :SUMS] = add_terms(after[place, :SUMS], added[some])
        after[place, SUMS] = ordinals[some][-1]
        before, done = before + len(added[some]), some.stop
        if bin_size(before) > size:
            later = after[1::2].copy()
            after[: BINS // 2] = np.hstack([after[::2, :SUMS] + later[:, :SUMS], later[:, SUMS:]])
            after[BINS // 2 :] = 0.0
    return after


def find(bins: Floats, requests: int) -> LevelShift | None:
    """The shift of the mean that bins [BINS, OF_BIN] of so many requests show, if they show one.

    Formula: r_i, the sum of what bin i accepts beyond a line on log length whose slope is that inside the
    bins; S their cumulative sums. The largest over k of

        G_k = D_k^2 / V_k,    D_k = (S_k - k / M S_M) / M^(1/2)
        V_k = (sum over i <= k of (S_i - i / k S_k)^2 + the same of the bins after k) / M^2

    must exceed CRITICAL. V_k stands for the long-run variance, which therefore need not be known: what makes
    bins wander on either side of k makes V_k larger.
    Assumptions: bins far apart are independent, and one change at most.
    Guarantee: asymptotic; CRITICAL is the quantile for independent normal bins, by simulation.
    Paper: Shao, Zhang 2010 (testing for change points in time series, by self-normalisation).
    """
    whole = requests // bin_size(requests)
    if whole < LEAST_BINS:
        return None
    own = bins[:whole]
    beyond = own[:, 1] - _slope(own) * own[:, 8]
    sums = np.concatenate([[0.0], np.cumsum(beyond)])
    places = range(LEAST_PART, whole - LEAST_PART + 1)
    found = [_against_itself(sums, place) for place in places]
    best = int(np.argmax(found))
    if found[best] <= CRITICAL:
        return None
    first, later = beyond[: places[best]], beyond[places[best] :]
    return LevelShift(
        places[best],
        float(later.mean() - first.mean()) / bin_size(requests),
        np.concatenate([first - first.mean(), later - later.mean()]),
    )


def _slope(bins: Floats) -> float:
    """Of x on log length inside the bins; 0 where lengths are all alike or follow from acceptance."""
    if length_of_acceptance(bins[:, :SUMS].sum(axis=0)):
        return 0.0
    n, x, line = bins[:, REQUESTS], bins[:, X], bins[:, L]
    squares = float((bins[:, LL] - line**2 / n).sum())
    return float((bins[:, LX] - line * x / n).sum()) / squares if squares > SMALLEST else 0.0


def _against_itself(sums: Floats, place: int) -> float:
    """G_k at k = `place`, of cumulative sums [M + 1] that begin with 0."""
    whole = len(sums) - 1
    moved = sums[place] - place / whole * sums[whole]
    before = sums[: place + 1] - np.arange(place + 1) / place * sums[place]
    after = sums[place:] - sums[place]
    after = after - np.arange(len(after)) / (whole - place) * after[-1]
    return float(moved**2 * whole / max(float((before**2).sum() + (after**2).sum()), SMALLEST))
