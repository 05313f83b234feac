"""The K that would be best now, and the acceptance at which speculation begins to pay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np

from driftguard.cost.times import BLOCKS, LEVEL, Floats, Line, Sample, one_label, runs, student, variance
from driftguard.cost.tokens_per_step import Chain
from driftguard.records.documents.cost import Choice, Interval

BEYOND: Final = 2  # how far above the largest measured K the best is looked for
_DOUBT: Final = 2.0  # standard errors below 0 at which a time is called implausible


@dataclass(frozen=True, slots=True, eq=False)
class Model:
    """Tokens per second at any K: tokens per step, of the newest requests, over seconds per step.

    Intervals hold for the logarithm, with the errors of the two taken as independent.
    """

    chain: Chain
    line: Line
    k: int  # in use

    def choices(self) -> tuple[Choice, ...]:
        """In order of K; 0 only where requests without speculation were timed."""
        highest = self.line.ks[-1] + BEYOND
        return tuple(
            self._choice(k)
            for k in range(highest + 1)
            if self.line.at(k) > 0.0 and (k > 0 or k in self.line.ks)
        )

    def _choice(self, k: int) -> Choice:
        tokens, _ = self.chain.tokens(k)
        seconds = self.line.at(k)
        gain = self.gain(k, self.k, LEVEL)
        return Choice(k, tokens, seconds, tokens / seconds, gain, k in self.line.ks)

    def gain(self, k: int, than: int, level: float) -> Interval:
        """Of tokens per second with `k` against those with `than`."""
        tokens, influence = self.chain.tokens(k)
        other_tokens, other_influence = self.chain.tokens(than)
        of_tokens = influence - other_influence
        slower, of_seconds = self._log_ratio(k, than)
        both = variance(of_tokens, runs(one_label(len(of_tokens)))) + variance(of_seconds, self.line.blocks)
        value, half = float(np.log(tokens / other_tokens)) - slower, self._quantile(level) * both**0.5
        return Interval(*(float(np.expm1(value + shift)) for shift in (0.0, -half, half)))

    def break_even(self, sample: Sample) -> Interval | None:
        """The acceptance rate at which K in use is as fast as none; None where none was not timed.

        A step emits 1 + rate x (drafted tokens per step), and has to emit t(K) / t(0). `sample`: requests
        with the K in use.
        """
        if 0 not in self.line.ks:
            return None
        drafted = float(sample.drafted.sum() / sample.steps.sum())
        slower, influence = self._log_ratio(self.k, 0)
        half = self._quantile(LEVEL) * variance(influence, self.line.blocks) ** 0.5
        return Interval(*(float(np.expm1(slower + shift)) / drafted for shift in (0.0, -half, half)))

    def _log_ratio(self, k: int, than: int) -> tuple[float, Floats]:
        """log t(k) / t(than), and the requests' part in its error [N]."""
        influence = self.line.log_influence(k) - self.line.log_influence(than)
        return float(np.log(self.line.at(k) / self.line.at(than))), influence

    def _quantile(self, level: float) -> float:
        return student(min(BLOCKS, self.line.fewest) - 1, level)


def best(model: Model, choices: Sequence[Choice]) -> tuple[int, bool]:
    """(the best K, whether it surely beats the K in use).

    0 where no K beats none by more than the uncertainty. One level for all comparisons (Bonferroni), because
    the largest of several uncertain gains is looked at. A K that was not timed itself is sure only on a line
    through two other K > 0: whether speculating at all has a cost of its own, one K > 0 cannot tell.
    """
    level = 1.0 - (1.0 - LEVEL) / max(len(choices) - 1, 1)
    fastest = max(choices, key=lambda item: item.tokens_per_second).num_speculative_tokens
    pays = 0 not in model.line.ks or any(
        model.gain(item.num_speculative_tokens, 0, level).low > 0.0
        for item in choices
        if item.num_speculative_tokens > 0
    )
    found = fastest if pays else 0
    told = found in model.line.ks or sum(k > 0 for k in model.line.ks) > 1
    return found, told and model.gain(found, model.k, level).low > 0.0


def implausible(line: Line) -> bool:
    """For sure, a step with more draft tokens takes less time than one with fewer; or no time at all."""
    for fewer, more in pairwise(line.ks):
        terms = line.terms(more) - line.terms(fewer)
        error = variance(line.influence @ terms, line.blocks) ** 0.5
        if float(terms @ line.coefficients) < -_DOUBT * error:
            return True
    return any(line.at(k) <= 0.0 for k in line.ks)
