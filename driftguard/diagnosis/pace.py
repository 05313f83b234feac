"""Times and lengths of answers: load, where each step takes longer, and looping, told without any text."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from driftguard.diagnosis.comparisons import (
    LEVEL,
    Difference,
    compare_ranks,
    difference,
    interval,
    rate_of,
)
from driftguard.diagnosis.evidence import Observed

LEAST_REQUESTS: Final = 20  # with times, on each side
LEAST_KNOWN: Final = 0.5
RELEVANT_SLOWDOWN: Final = math.log(1.25)
EXCLUDED_MOVE: Final = 0.05  # of acceptance: "did not move" is said only where the interval excludes this


@dataclass(frozen=True, slots=True)
class Load:
    """`slower`: change of the logarithm of seconds per step, 99% interval. `concurrency_rose`, `queue_rose`:
    more requests run, or wait for their turn; shown by ranks; None where it is not told."""

    slower: Difference
    concurrency_rose: bool | None
    queue_rose: bool | None

    @property
    def is_busier(self) -> bool | None:
        if self.concurrency_rose is None and self.queue_rose is None:
            return None
        return bool(self.concurrency_rose or self.queue_rose)

    @property
    def is_slower(self) -> bool:
        return self.slower.low > 0.0 and self.slower.change >= RELEVANT_SLOWDOWN

    @property
    def factor(self) -> float:
        return math.exp(self.slower.change)


def compare_steps(before: Sequence[Observed], after: Sequence[Observed]) -> Load | None:
    """Of the changed segments. None where too few requests have times.

    Formula: t = log(seconds per output token * output tokens / steps), Welch's comparison of means.
    """
    times = [[seconds for one in side if (seconds := _seconds_per_step(one))] for side in (before, after)]
    if any(
        len(t) < max(LEAST_REQUESTS, LEAST_KNOWN * len(side))
        for t, side in zip(times, (before, after), strict=True)
    ):
        return None
    logs = [np.log(side) for side in times]
    error = math.sqrt(sum(float(side.var(ddof=1)) / len(side) for side in logs))
    freedom = min(len(side) for side in logs) - 1
    slower = interval(float(logs[1].mean() - logs[0].mean()), error, freedom)
    sides = (before, after)
    return Load(
        slower,
        _rose([[one.concurrency for one in side] for side in sides]),
        _rose([[one.waiting_requests for one in side] for side in sides]),
    )


def _rose(sides: Sequence[Sequence[int | None]]) -> bool | None:
    told = [[float(value) for value in side if value is not None] for side in sides]
    if min(map(len, told)) < LEAST_REQUESTS:
        return None
    return compare_ranks(told[0], told[1]).p_rose <= LEVEL


def _seconds_per_step(one: Observed) -> float | None:
    if not one.time_per_output_token_seconds or not one.steps or not one.output_tokens:
        return None
    return one.time_per_output_token_seconds * one.output_tokens / one.steps


LONG: Final = 0.9  # quantile of the lengths before
GUESSED: Final = 0.9  # of the draft tokens of an answer are accepted
RELEVANT_RISE: Final = 0.1  # of the requests


@dataclass(frozen=True, slots=True)
class Looping:
    """Share of the requests whose answer is both long and guessed nearly without error: repetitions."""

    before: float
    after: float
    change: Difference

    @property
    def rose(self) -> bool:
        return self.change.p_value <= LEVEL and self.change.change >= RELEVANT_RISE


def compare_looping(before: Sequence[Observed], after: Sequence[Observed]) -> Looping | None:
    """Of the changed segments. None where too few requests tell their length, or all were long before."""
    told = [
        [one for one in side if one.output_tokens is not None and one.drafted] for side in (before, after)
    ]
    if min(map(len, told)) < LEAST_REQUESTS:
        return None
    long_from = float(np.quantile([one.output_tokens or 0 for one in told[0]], LONG))

    def loops(one: Observed) -> bool:
        return (one.output_tokens or 0) >= long_from and one.accepted >= GUESSED * one.drafted

    rates = [rate_of((1, int(loops(one))) for one in side) for side in told]
    if rates[0] is None or rates[1] is None:
        return None
    return Looping(rates[0].rate, rates[1].rate, difference(rates[0], rates[1]))
