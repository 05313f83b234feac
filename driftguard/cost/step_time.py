"""Seconds per step against K: t(K) = a + b K, and + s for every K > 0 where that can be told.

Least squares over requests, each weighted by its timed steps, in one band of concurrency: a step of a fuller
server takes longer at any K, so mixed bands would put the traffic's rush hours into b. Tokens emitted in a
step are left out: they differ by a few per step, all of them within the same forward pass.

What can be told depends on which K were seen (each in at least LEAST_REQUESTS requests):

    two different K > 0 and requests without speculation    a, b and s
    two different K > 0                                      a and b; t(0) = a is beyond what was measured
    one K > 0 and requests without speculation               a and b, a straight line through both
    anything less                                            nothing

Errors are those of runs of consecutive requests of one K (`sample.runs`), so a K that does not lie on the
line widens them too. Assumption: requests of different K differ in nothing else that changes the time of a
step. Requests of all K are therefore taken from one day, and should come from the same hours of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from driftguard.cost.sample import LEAST_REQUESTS, Floats, Ints, Sample, runs, variance
from driftguard.records.documents.cost import SeenK, StepTime


@dataclass(frozen=True, slots=True, eq=False)
class Line:
    """A fitted t(K), with what each of the N requests contributes to the coefficients' error."""

    coefficients: Floats  # [C] a, b and s where it was told
    influence: Floats  # [N, C]
    blocks: Ints  # [N]
    ks: tuple[int, ...]  # seen, in order
    fewest: int  # requests of one K

    def terms(self, k: int) -> Floats:
        """[C] with t(K) = terms . coefficients."""
        return np.array([1.0, k, float(k > 0)])[: len(self.coefficients)]

    def at(self, k: int) -> float:
        return float(self.terms(k) @ self.coefficients)

    def log_influence(self, k: int) -> Floats:
        """[N] of log t(K)."""
        part: Floats = self.influence @ self.terms(k) / self.at(k)
        return part


def seen_ks(sample: Sample) -> tuple[SeenK, ...]:
    """In order of K; those of too few requests are not seen."""
    values, counts = np.unique(sample.k, return_counts=True)
    pairs = zip(values.tolist(), counts.tolist(), strict=True)
    return tuple(SeenK(value, count) for value, count in pairs if count >= LEAST_REQUESTS)


def fit(sample: Sample, seen: tuple[SeenK, ...]) -> Line | None:
    """None where the K that were seen do not tell."""
    ks = tuple(item.num_speculative_tokens for item in seen)
    if len(ks) < 2:
        return None
    sample = sample[np.isin(sample.k, ks)]
    k = sample.k.astype(np.float64)
    columns = [np.ones_like(k), k]
    if ks[0] == 0 and len(ks) > 2:
        columns.append((k > 0).astype(np.float64))
    design = np.stack(columns, axis=1)
    inverse = np.linalg.inv(design.T @ (design * sample.timed_steps[:, None]))
    coefficients = inverse @ (design.T @ sample.seconds)
    residual = sample.seconds - sample.timed_steps * (design @ coefficients)
    influence = (design * residual[:, None]) @ inverse
    return Line(coefficients, influence, runs(sample.k), ks, min(item.requests for item in seen))


def step_time(line: Line, seen: tuple[SeenK, ...]) -> StepTime:
    coefficients = line.coefficients.tolist()
    errors = [variance(column, line.blocks) ** 0.5 for column in line.influence.T]
    return StepTime(
        seconds=coefficients[0],
        seconds_error=errors[0],
        seconds_per_draft_token=coefficients[1],
        seconds_per_draft_token_error=errors[1],
        seconds_of_speculating=coefficients[2] if len(coefficients) > 2 else None,
        seen=seen,
    )
