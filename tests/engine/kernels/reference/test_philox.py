"""The random numbers: published known answers, separate streams, sound uniforms."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from driftguard_engine.kernels.reference import philox
from numpy.typing import ArrayLike, NDArray
from scipy import stats

# Random123 (Salmon et al. 2011), kat_vectors, philox4x32 with 10 rounds: counter, key, answer.
KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def wide(text: str) -> list[int]:
    """Words of 32 bits in pairs, low one first, as the integers of 64 bits that hold them: with a sign."""
    words = [int(word, 16) for word in text.split()]
    whole = [low | high << 32 for low, high in zip(words[::2], words[1::2], strict=True)]
    return [each - (each >> 63 << 64) for each in whole]


def drawn(answer: str) -> list[int]:
    """Of each pair the first word in the upper half."""
    first, second, third, fourth = (int(word, 16) for word in answer.split())
    return [first << 32 | second, third << 32 | fourth]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS)
def test_published_vectors(counter: str, key: str, answer: str) -> None:
    (position, purpose), (seed,) = wide(counter), wide(key)
    assert philox.words(seed, position, purpose).tolist() == drawn(answer)


def test_rows_are_computed_apart() -> None:
    counters, keys, answers = zip(*KNOWN_ANSWERS, strict=True)
    position, purpose = zip(*map(wide, counters), strict=True)
    seed = [wide(key)[0] for key in keys]
    assert philox.words(seed, position, purpose).T.tolist() == [drawn(answer) for answer in answers]


def uniforms(seed: ArrayLike, position: ArrayLike, purpose: ArrayLike) -> NDArray[np.float64]:
    return philox.uniforms_of(philox.words(seed, position, purpose)[0])


def test_a_uniform_is_the_upper_bits_of_the_first_word() -> None:
    seed, position, purpose = -(2**63) + 12345678901, (7 << 32) + 9, 3
    first = int(philox.words(seed, position, purpose)[0])
    expected = (first >> 11) / 2**53
    assert uniforms(torch.tensor([seed]), torch.tensor([position]), purpose).tolist() == [expected]


def test_streams_differ_by_seed_position_and_purpose() -> None:
    seed = torch.tensor([1, 1, 1, 2, 1 + (1 << 32), 1])
    position = torch.tensor([5, 6, 5, 5, 5, 5 + (1 << 32)])
    drawn = uniforms(seed, position, [1, 1, 2, 1, 1, 1])
    assert len(set(drawn.tolist())) == 6


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_uniform_and_uncorrelated_between_purposes(vary: str) -> None:
    count = 100_000
    index, fixed = torch.arange(count), torch.full((count,), 42)
    seed, position = (index, fixed) if vary == "seed" else (fixed, index)
    draws = [uniforms(seed, position, purpose) for purpose in (philox.DRAFT, philox.ACCEPT, philox.RESIDUAL)]
    for drawn in draws:
        assert stats.kstest(drawn, "uniform").pvalue > 1e-4
        assert stats.pearsonr(drawn[:-1], drawn[1:]).pvalue > 1e-4  # neighbours
    for one, other in ((0, 1), (0, 2), (1, 2)):
        assert stats.pearsonr(draws[one], draws[other]).pvalue > 1e-4
