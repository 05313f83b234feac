"""When did it change? The start that the evidence of an alarm points to, with an interval."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from driftguard.detection.bets import Floats, factors, stakes

INTERVAL_LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Located:
    """Places among the T requests that were looked at: the change point and its interval."""

    point: int
    first: int
    last: int


def locate(x: Floats, mean: Floats, variance: Floats, *, rise: bool) -> Located:
    """Among requests x [T >= 1] up to an alarm, with each request's own baseline mean and variance [T].

    Formula: the sum R of a bet is the sum over k of the product P_kj of its factors from request k on
    (`bets.py`). The change point is the k of the largest P_kj over all k and bets j; the interval is
    the smallest run of requests around it that holds 95% of the sum over j and k of P_kj. Here the
    bets are made around the baseline mean itself, not the safe baseline below it: the margin that
    protects from false alarms would move the change point late.
    Assumptions: one change; P_kj is then close to the likelihood of a change at k, and the interval to
    the posterior of a flat prior.
    Guarantee: none proved; coverage is measured in tests/detection (see COVERAGE there).
    Paper: Saha, Ramdas 2025 (localisation by the evidence of an e-detector).
    """
    bets = factors(x, mean, stakes(1.0 - mean if rise else mean, variance), rise=rise)
    products = np.cumsum(np.log(bets)[::-1], axis=0)[::-1]  # [T, BETS] log of P_kj
    point = int(products.max(axis=1).argmax())
    weights = np.exp(products - products.max()).sum(axis=1)  # [T]
    first, last = _shortest_run(weights, point, INTERVAL_LEVEL)
    return Located(point, first, last)


def _shortest_run(weights: NDArray[np.float64], point: int, level: float) -> tuple[int, int]:
    """The run around `point` that grows to the heavier neighbour until it holds `level` of the weight."""
    wanted, held = level * weights.sum(), weights[point]
    first = last = point
    while held < wanted:
        left = weights[first - 1] if first > 0 else -1.0
        right = weights[last + 1] if last + 1 < len(weights) else -1.0
        if max(left, right) < 0.0:
            break
        if left > right:
            first -= 1
            held += left
        else:
            last += 1
            held += right
    return first, last
