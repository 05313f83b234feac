"""The exact law of the first steps of a request, through the whole engine, and what it has to be."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from driftguard_engine.adaptive_k.controller import DraftLengthController
from driftguard_engine.adaptive_k.plan import DraftingRow, DraftPlan, FixedK, Given
from driftguard_engine.engine import Engine
from scipy import stats
from torch import Tensor

from tests.engine.core.every_drafter import LETTERS, PROMPT, Drafted
from tests.engine.core.tiny import drain, request
from tests.engine.verify.broken import softmax
from tests.engine.verify.enumeration import Decisions, Known, Run

Law = dict[tuple[Run, ...], float]  # by what each step emits
_FOLLOWING_K = {0: 1, 1: 2, 2: 0}  # by how many were accepted


class ReactingK(FixedK):
    """K of a request's step: by what it accepted in the step before."""

    def __init__(self) -> None:
        super().__init__()
        self._next: dict[str, int] = {}

    def plan(self, rows: Sequence[DraftingRow]) -> DraftPlan:
        counts = tuple(min(row.wanted, self._next.get(row.request_id, 1)) for row in rows)
        return DraftPlan(tuple(rows), counts, max(counts, default=0), "fixed")

    def learned(self, plan: DraftPlan, seconds: float | None, given: Mapping[str, Given]) -> None:
        self._next |= {name: _FOLLOWING_K[each.accepted] for name, each in given.items()}


def law_of_engine(engine: Engine, steps: int, **params: Any) -> Law:
    """Of requests behind PROMPT whose K is `ReactingK`'s: one for each way that the steps can go."""
    waiting: list[Known] = [{}]
    law: Law = defaultdict(float)
    while waiting:
        decided, runs = Decisions(waiting), dict[str, list[Run]]()
        engine.drafting = DraftLengthController(ReactingK())
        for row in range(len(waiting)):
            runs[str(row)] = []
            engine.submit(request(str(row), PROMPT, 20, seed=row, **params))
        with pytest.MonkeyPatch.context() as patched:
            decided.plant(patched)
            while engine.has_work():
                for output in engine.step():
                    run = runs[output.request_id]
                    if output.finished is not None and output.finished.finish_reason == "error":
                        raise AssertionError(output.finished.error)
                    if output.token_ids and len(run) < steps:
                        run.append(tuple(output.token_ids))
                        if len(run) == steps:
                            engine.abort(output.request_id)
                            decided.over.add(int(output.request_id))
            drain(engine)
        for row, known in enumerate(decided.known):
            law[tuple(runs[str(row)])] += prod(high - low for low, high in known.values())
        waiting = [known for _, known in decided.others]
    return law


class TargetLaw:
    """What the target's own forward, anew over each text, gives behind it."""

    def __init__(self, module: Any, **params: Any) -> None:
        self._module, self.params = module, params

    @cache  # noqa: B019 as long as a test
    def of(self, text: Run) -> list[float]:
        with torch.inference_mode():
            logits = self._module(torch.tensor([PROMPT + text])).logits[:, -1]
        return list(shaped(logits, **self.params)[0].tolist())


def shaped(logits: Tensor, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """[N, V] as probabilities."""
    ones = torch.ones(len(logits))
    return softmax(logits, temperature * ones, (top_k * ones).long(), top_p * ones.double())


def distance_of_tokens(law: Law, target: TargetLaw) -> float:
    """The most by which a probability of tokens, gone on by the target's own draws, is not the target's."""
    ending: dict[Run, float] = defaultdict(float)
    for runs, mass in law.items():
        ending[sum(runs, ())] += mass
    inner = {text[:length] for text in ending for length in range(len(text))}
    waiting: list[tuple[Run, float, float]] = [((), ending.get((), 0.0), 1.0)]
    found = 0.0
    while waiting:
        text, reached, expected = waiting.pop()
        if text not in inner:
            found = max(found, abs(reached - expected))
            continue
        for token, share in enumerate(target.of(text)):
            longer = (*text, token)
            waiting.append((longer, reached * share + ending.get(longer, 0.0), expected * share))
    return found


def expected_law(drafted: Iterable[Drafted], target: TargetLaw, steps: int) -> Law:
    """By the rule of Leviathan, Kalman and Matias from what was drafted, or of guesses in a tree."""
    q: dict[tuple[Run, int, Run], list[float]] = {}
    paths: dict[tuple[Run, int], frozenset[Run]] = {}
    for each in drafted:
        behind = each.text[len(PROMPT) :], each.asked
        if each.paths is not None:
            paths[behind] = each.paths
            continue
        for place, token in enumerate(each.tokens):
            if each.logits is None:
                law = [float(other == token) for other in range(LETTERS)]
            else:
                law = shaped(each.logits[[place]], **target.params)[0].tolist()
            q[*behind, each.tokens[:place]] = law

    def of_step(text: Run, k: int) -> Iterable[tuple[Run, float]]:
        waiting: list[tuple[Run, float]] = [((), 1.0)]
        while waiting:
            run, mass = waiting.pop()
            p, guessed = target.of(text + run), paths.get((text, k), frozenset())
            law = q.get((text, k, run), [0.0] * LETTERS)
            for token, share in enumerate(p):
                longer = (*run, token)
                kept = share if longer in guessed else min(share, law[token])
                if kept:
                    waiting.append((longer, mass * kept))
                if share > kept:
                    yield longer, mass * (share - kept)

    found: Law = {(): 1.0}
    ks: dict[tuple[Run, ...], int] = {(): 1}
    for _ in range(steps):
        following: Law = defaultdict(float)
        for runs, mass in found.items():
            for run, share in of_step(sum(runs, ()), ks[runs]):
                following[(*runs, run)] += mass * share
                ks[*runs, run] = _FOLLOWING_K[len(run) - 1]
        found = following
    return found


def apart(one: Law, other: Law) -> float:
    return max(abs(one.get(runs, 0.0) - other.get(runs, 0.0)) for runs in {*one, *other})


def exact_distribution(
    module: Any, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0
) -> dict[Run, float]:
    """Probability of every first three tokens, by enumeration in float64."""

    def distribution(ids: tuple[int, ...]) -> np.ndarray[Any, Any]:
        with torch.inference_mode():
            logits = module(torch.tensor([ids])).logits[0, -1].double().numpy() / temperature
        order = np.argsort(-logits, kind="stable")
        if top_k:
            logits[order[top_k:]] = -np.inf
        p = np.exp(logits - logits.max())
        p /= p.sum()
        before = np.concatenate([[0.0], np.cumsum(p[order])[:-1]])
        p[order[before >= top_p]] = 0.0
        normalised: np.ndarray[Any, Any] = p / p.sum()
        return normalised

    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(3):
        joint = {
            (*drawn, token): mass * step[token]
            for drawn, mass in joint.items()
            for step in [distribution(PROMPT + drawn)]
            for token in range(LETTERS)
            if mass > 0
        }
    return joint


def p_value(observed: Counter[tuple[int, ...]], distribution: dict[tuple[int, ...], float]) -> float:
    """Chi-square, cells expected fewer than 5 times merged into one."""
    total = observed.total()
    assert not [drawn for drawn in observed if distribution[drawn] == 0], (
        "a token that the filter excludes was emitted"
    )
    large = [drawn for drawn in distribution if distribution[drawn] * total >= 5]
    counts = [observed[drawn] for drawn in large]
    expected = [distribution[drawn] * total for drawn in large]
    rest = total - sum(expected)
    if rest > 1e-6:
        counts.append(total - sum(counts))
        expected.append(rest)
    return float(stats.chisquare(counts, expected, sum_check=False).pvalue)
