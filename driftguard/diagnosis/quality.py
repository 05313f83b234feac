"""Looping or garbled output: text that repeats itself is easy to guess, so acceptance rises far too high."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from driftguard.diagnosis import rank_test
from driftguard.diagnosis.evidence import Captured

LENGTH: Final = 4  # tokens of an n-gram
MINIMUM_OUTPUT: Final = 16  # tokens; shorter answers have hardly any n-gram to repeat
MINIMUM_SAMPLE: Final = 10
RELEVANT_RISE: Final = 0.1  # of the mean repetition rate


@dataclass(frozen=True, slots=True)
class Repetition:
    """Mean repetition rate of captured answers before and after, and the p-value of "it has not risen"."""

    requests_before: int
    requests_after: int
    before: float
    after: float
    p_value: float

    def rose(self, level: float) -> bool:
        return self.p_value <= level and self.after - self.before >= RELEVANT_RISE


def repetition_rate(tokens: Sequence[int]) -> float:
    """Part of the 4-grams of a text that occurred in it before: 1 - distinct / all; 0 for short texts.

    Paper: Welleck et al., Neural text generation with unlikelihood training (2020), seq-rep-4.
    """
    grams = [tuple(tokens[place : place + LENGTH]) for place in range(len(tokens) - LENGTH + 1)]
    return 1.0 - len(set(grams)) / len(grams) if grams else 0.0


def compare(
    before: Sequence[Captured], after: Sequence[Captured], changed: Sequence[str]
) -> Repetition | None:
    """None where there are too few captured answers of the changed segments on either side.

    Test: Mann-Whitney on the answers' rates, one-sided. Assumption: independent requests; the level is
    approximate below some 20 requests a side.
    """
    rates0, rates1 = (
        [repetition_rate(one.output) for one in side if _counts(one, changed)] for side in (before, after)
    )
    if min(len(rates0), len(rates1)) < MINIMUM_SAMPLE:
        return None
    p_value = rank_test.compare(rates0, rates1).p_rose
    return Repetition(len(rates0), len(rates1), float(np.mean(rates0)), float(np.mean(rates1)), p_value)


def _counts(one: Captured, changed: Sequence[str]) -> bool:
    return one.segment in changed and len(one.output) >= MINIMUM_OUTPUT
