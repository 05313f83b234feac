"""What is drawn by proposals has the law of the masses that they stand for, also where none stays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from driftguard_engine.kernels.reference import philox
from driftguard_engine.kernels.reference import verify as reference
from driftguard_engine.kernels.reference.philox import RandomWords
from driftguard_engine.kernels.reference.sampling import Doubles, SamplingBatch
from driftguard_engine.kernels.reference.verify import Chain, Noise
from torch import Tensor

from tests.engine.verify.distributions import Distribution, assert_distribution, distribution_of

pytestmark = pytest.mark.slow

SEED = 20_280
SIZE = 2048 + 40  # two tiles, of which the second is short: the least of which tokens are proposed
ROWS, BATCH = 5_000, 1_000
HEAVY = [3, 700, 1500, 2047, 2048, 2060, SIZE - 1]


@dataclass(frozen=True)
class Rejection:
    """A token that the target rules out is offered, so that it is always rejected."""

    target: Tensor  # [V]
    draft: Tensor  # [V]
    top_k: int = 0
    top_p: float = 1.0
    certain: bool = False

    @property
    def offered(self) -> int:
        return 11

    def law(self) -> Distribution:
        p, q = (
            distribution_of(logits.tolist(), 1.0, self.top_k, self.top_p)
            for logits in (self.target, self.draft)
        )
        excess = [max(mine - theirs, 0.0) for mine, theirs in zip(p, q, strict=True)]
        return {(token,): mass / sum(excess) for token, mass in enumerate(excess)}

    def left(self) -> float:
        """The probability with which a proposal stays, where nothing is cut."""
        p, q = (logits.double().softmax(0) for logits in (self.target, self.draft))
        return float((p - q).clamp(min=0).sum())


def rejection(spread: float) -> Rejection:
    """spread: of the difference between both models, apart from the token that is offered."""
    random = torch.Generator().manual_seed(SEED)
    draft = torch.randn(SIZE, generator=random)
    draft[HEAVY] += torch.tensor([6.0, 5.0, 6.5, 5.5, 6.0, 7.0, 6.5])
    target = draft + spread * torch.randn(SIZE, generator=random)
    target[11] = -torch.inf
    return Rejection(target, draft)


def point_mass() -> Rejection:
    case = rejection(0.0)
    draft = torch.full((SIZE,), -torch.inf)
    draft[11] = 0.0
    return replace(case, draft=draft, certain=True)


CASES = {
    "much is left": rejection(1.5),
    "little is left": rejection(0.05),
    "top-p": replace(rejection(1.5), top_p=0.8),
    "top-k": replace(rejection(1.5), top_k=40),
    "top-k that leaves little": replace(rejection(1.5), top_k=2),
    "top-k and top-p": replace(rejection(0.7), top_k=60, top_p=0.9),
    "an offered token that was certain": point_mass(),
}


def assert_law(case: Rejection, name: str) -> None:
    counts: Counter[tuple[int, ...]] = Counter()
    for first in range(0, ROWS, BATCH):
        ones = torch.ones(BATCH)
        sampling = SamplingBatch.of(
            ones, (case.top_k * ones).long(), case.top_p * ones.double(), torch.arange(BATCH) + first
        )
        chain = Chain(
            case.target.expand(BATCH, 2, SIZE),
            case.draft.expand(BATCH, 1, SIZE),
            torch.full((BATCH, 1), case.offered),
            torch.ones(BATCH, dtype=torch.int64),
            sampling,
            np.full(BATCH, SEED),
        )
        tokens, accepted = reference.verify_chain(chain)
        assert not bool(accepted.any())
        counts.update((token,) for token in tokens[:, 0].tolist())
    assert_distribution(counts, case.law(), f"{name}, seed {SEED}")


@pytest.mark.parametrize("name", CASES)
def test_a_rejected_token_is_replaced_by_the_law_of_what_is_left(name: str) -> None:
    assert_law(CASES[name], name)


def test_what_is_left_of_each_case_asks_for_both_ways() -> None:
    """More than a tenth: nearly all rows are drawn by proposals. A few percent: many are not."""
    assert CASES["much is left"].left() > 0.1
    assert 0.2 < (1 - CASES["little is left"].left()) ** reference.PROPOSALS < 0.8


Proposal = tuple[RandomWords, Doubles]


def always_stays(noise: Noise, proposed: Callable[[int], Proposal], number: int) -> Proposal:
    words, uniform = proposed(number)
    return words, np.zeros_like(uniform)


def shares_the_words_of_the_sums(noise: Noise, proposed: Callable[[int], Proposal], number: int) -> Proposal:
    words, uniform = proposed(number)
    return np.stack((noise.words[0], words[1], noise.words[1])), uniform


def stays_by_the_words_that_drew_it(
    noise: Noise, proposed: Callable[[int], Proposal], number: int
) -> Proposal:
    words, _ = proposed(number)
    return words, philox.uniforms_of(words[2])


@pytest.mark.parametrize(
    "mistake", [always_stays, shares_the_words_of_the_sums, stays_by_the_words_that_drew_it]
)
def test_a_planted_mistake_is_seen(monkeypatch: pytest.MonkeyPatch, mistake: Callable[..., Proposal]) -> None:
    proposal = Noise.proposal
    monkeypatch.setattr(
        Noise, "proposal", lambda noise, number: mistake(noise, lambda n: proposal(noise, n), number)
    )
    with pytest.raises(AssertionError, match="chi-square"):
        assert_law(CASES["much is left"], "much is left")
