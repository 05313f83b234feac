"""All outcomes of steps and their exact probabilities, as the engine's own reference computes them.

In place of each random number stands the interval that it is known to lie in. Where a decision divides the
interval, the step is run once for each part: the lengths of the intervals are the probability of an outcome.
A number that a later step uses again is still known to lie there. So nothing is sampled, and a deviation is
seen from float32's rounding on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from driftguard_engine.kernels.reference import philox
from driftguard_engine.kernels.reference import verify as reference
from driftguard_engine.kernels.reference.sampling import SamplingBatch
from driftguard_engine.kernels.reference.verify import Rule
from driftguard_engine.speculation import ReferenceVerification, Verified
from torch import Tensor

from tests.engine.verify.distributions import Scenario

Run = tuple[int, ...]
Known = dict[int, tuple[float, float]]  # by code of (position, purpose)
Steps = Callable[[Tensor, Tensor, Tensor], Verified]  # seeds, positions and last tokens of the rows: [B]
_FIRST = 1  # position of the first token
_ROUNDING = 1e-9


class _Numbers:
    """Stands for uniform numbers, which are only ever multiplied and compared."""

    def __init__(self, decided: Decisions, codes: Any) -> None:
        self._decided, self._codes = decided, codes

    def __getitem__(self, index: Any) -> _Numbers:
        return _Numbers(self._decided, self._codes[index])

    def __mul__(self, q: Any) -> _Scaled:
        return _Scaled(self._decided, self._codes, q)


class _Scaled:
    def __init__(self, decided: Decisions, codes: Any, q: Any) -> None:
        self._decided, self._codes, self._q = decided, codes, q

    def __lt__(self, p: Any) -> Any:
        """Whether u q < p."""
        with np.errstate(divide="ignore", invalid="ignore"):
            passing = np.nan_to_num(np.where(self._q > 0, p / self._q, np.sign(p))).clip(0, 1)
        edges = np.stack((np.zeros_like(passing), passing, np.ones_like(passing)), -1)
        found = self._decided.cells(self._codes.ravel(), edges.reshape(-1, 3))
        return found.reshape(self._codes.shape) == 0


class Decisions:
    """Of one run of a step: what is known of each row, and the other ways that it could have gone."""

    def __init__(self, known: list[Known]) -> None:
        self.known = known
        self.others: list[tuple[int, Known]] = []  # row, and what is known of it there
        self.over: set[int] = set()  # rows that decide nothing more

    def plant(self, patched: pytest.MonkeyPatch) -> None:
        """From here on these stand for the engine's random numbers; a row is the request with its seed."""
        patched.setattr(philox, "words", self.words)
        patched.setattr(philox, "uniforms_of", self.numbers)
        patched.setattr(reference, "pick", self.pick)

    def words(self, seed: Any, position: Any, purpose: Any) -> Any:
        row, at, why = np.broadcast_arrays(
            *(np.asarray(each, np.int64) for each in (seed, position, purpose))
        )
        codes = row << 32 | at << 16 | why >> 32 << 8 | why & 0xFF
        return np.stack((codes, codes))

    def numbers(self, codes: Any) -> _Numbers:
        return _Numbers(self, codes)

    def pick(self, mass: Any, codes: Any) -> Any:
        held = mass.astype(np.float64).cumsum(-1)
        return self.cells(codes, np.pad(held / held[:, -1:], ((0, 0), (1, 0))))

    def cells(self, codes: Any, edges: Any) -> Any:
        """The part that each number lies in, of those between these edges [N, n + 1]."""
        found = np.zeros(len(codes), np.int64)
        for place, (code, ends) in enumerate(zip(codes.tolist(), edges.tolist(), strict=True)):
            row, key = code >> 32, code & 0xFFFFFFFF
            low, high = self.known[row].get(key, (0.0, 1.0))
            parts = []
            for cell in range(max(bisect_right(ends, low) - 1, 0), len(ends) - 1):
                part = max(low, ends[cell]), min(high, ends[cell + 1])
                if part[1] - part[0] > _ROUNDING:
                    parts.append((cell, part))
            (found[place], mine), *others = parts
            if row in self.over:
                continue
            self.others += [(row, self.known[row] | {key: part}) for _, part in others]
            self.known[row][key] = mine
        return found


def law_of_steps(step: Steps, count: int, rule: Rule | None = None) -> dict[tuple[Run, ...], float]:
    """P(what each of the first `count` steps emits) behind token 0. rule: of chains."""
    states: dict[tuple[tuple[Run, ...], tuple[Any, ...]], float] = {((), ()): 1.0}
    for _ in range(count):
        following: dict[tuple[tuple[Run, ...], tuple[Any, ...]], float] = defaultdict(float)
        waiting = [(runs, dict(known), mass) for (runs, known), mass in states.items()]
        while waiting:
            decided = Decisions([known for _, known, _ in waiting])
            emitted = _run(step, decided, [runs for runs, _, _ in waiting])
            for (runs, _, mass), known, run in zip(waiting, decided.known, emitted, strict=True):
                position = _FIRST + sum(map(len, runs)) + len(run)
                over = {key for key in known if _is_over(key, position, rule)}
                mass *= prod(known[key][1] - known[key][0] for key in over)
                left = tuple(sorted((key, part) for key, part in known.items() if key not in over))
                following[(*runs, run), left] += mass
            waiting = [(waiting[row][0], known, waiting[row][2]) for row, known in decided.others]
        states = following
    law: dict[tuple[Run, ...], float] = defaultdict(float)
    for (runs, parts), mass in states.items():
        law[runs] += mass * prod(high - low for _, (low, high) in parts)
    return law


def _is_over(key: int, position: int, rule: Rule | None) -> bool:
    """Whether no step from this position on may use the number: those of blocks are of one step alone."""
    return key >> 16 < position or (rule == "block" and 0 < (key >> 8 & 0xFF) < position)


def _run(step: Steps, decided: Decisions, runs: list[tuple[Run, ...]]) -> list[Run]:
    last = torch.tensor([run[-1][-1] if run else 0 for run in runs])
    positions = torch.tensor([_FIRST + sum(map(len, run)) for run in runs])
    with pytest.MonkeyPatch.context() as patched:
        decided.plant(patched)
        found = step(torch.arange(len(runs)), positions, last)
    assert torch.equal((found.tokens >= 0).sum(1), found.accepted + 1)
    return [tuple(token for token in run if token >= 0) for run in found.tokens.tolist()]


def chain_step(case: Scenario, rule: Rule) -> Steps:
    """A step that drafts a chain."""

    def step(seed: Tensor, position: Tensor, last: Tensor) -> Verified:
        rows, drafts = len(seed), case.drafted
        ones = torch.ones(rows)
        sampling = SamplingBatch.of(
            case.temperature * ones, (case.top_k * ones).long(), case.top_p * ones.double(), seed
        )
        drafted = torch.full((rows,), drafts, dtype=torch.int32)
        chain = ReferenceVerification(sampling, position.numpy(), drafted, drafts, case.size, rule)
        logits, token = [case.target[0, last]], last
        for place in range(drafts):
            chain.draft_logits[:, place] = case.draft[place, token]
            chain.draw(place)
            token = chain.draft_tokens[:, place]
            logits.append(case.target[place + 1, token])
        return chain.verify(torch.stack(logits, 1))

    return step
