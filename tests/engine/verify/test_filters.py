"""Top-k, top-p, ties, -inf and precision, over whatever logits hypothesis thinks of."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from driftguard_engine.kernels.reference.inverse_cdf import pick
from driftguard_engine.kernels.reference.philox import RandomWords
from driftguard_engine.kernels.reference.tiles import TILE
from driftguard_engine.verify import verify_chain
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from tests.engine.verify.distributions import distribution_of, sample_draft
from tests.engine.verify.engine_distributions import probabilities

# Few distinct values, so that ties are the rule; some tokens ruled out.
LOGITS = st.lists(
    st.sampled_from([-torch.inf, -3.0, -1.5, -0.5, 0.0, 0.25, 1.0, 2.0]), min_size=1, max_size=40
).filter(lambda logits: max(logits) > -torch.inf)
# top_p away from sums that these logits reach exactly: there the last bit of a sum decides.
TOP_P = st.sampled_from([0.0, 1e-9, 0.0613, 0.3217, 0.6841, 0.8899, 0.99713, 1.0, 1.5])


def distribution(logits: Tensor, temperature: float, top_k: int, top_p: float) -> list[float]:
    found: list[float] = probabilities(logits.unsqueeze(0), temperature, top_k, top_p)[0].tolist()
    return found


@given(
    logits=LOGITS, temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]), top_k=st.integers(-1, 45), top_p=TOP_P
)
@settings(max_examples=300, deadline=None)
def test_law_equals_the_one_on_paper(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    found = distribution(torch.tensor(logits), temperature, top_k, top_p)
    assert found == pytest.approx(distribution_of(logits, temperature, top_k, top_p), abs=1e-6)


def words(fractions: list[float]) -> RandomWords:
    return np.array([int(fraction * 2.0**64) for fraction in fractions], dtype=np.uint64)


@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-9, 0.1, 1.0, 7.0]), min_size=1, max_size=50).filter(any),
    fraction=st.sampled_from([0.0, 2.0**-53, 0.25, 0.5, 1 - 2.0**-53]) | st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=300, deadline=None)
def test_pick_finds_an_index_that_has_mass(weights: list[float], fraction: float) -> None:
    mass = np.array([weights])
    token = pick(mass, words([fraction])).item()
    assert weights[token] > 0
    total = sum(weights)
    assert sum(weights[:token]) <= (fraction + 1e-11) * total
    assert sum(weights[: token + 1]) >= (fraction - 1e-11) * total


@pytest.mark.parametrize("size", [1, 2, TILE - 1, TILE])
def test_pick_by_the_largest_and_the_smallest_word(size: int) -> None:
    mass = np.random.default_rng(size).random((200, size), np.float32) + 0.01
    assert pick(mass, np.full(200, 2**64 - 1, dtype=np.uint64)).tolist() == [size - 1] * 200
    assert pick(mass, np.zeros(200, dtype=np.uint64)).tolist() == [0] * 200


def drawn_from(logits: Tensor, rows: int) -> Tensor:
    """Tokens drawn from one row of logits [V] with `rows` seeds, few at a time to spare memory."""
    zero = torch.zeros(100, dtype=torch.int64)
    shaping = (torch.ones(100), zero, torch.ones(100))
    parts = torch.arange(rows).view(-1, 100)
    return torch.cat([sample_draft(logits.expand(100, -1), *shaping, seeds, zero) for seeds in parts])


@pytest.mark.parametrize("size", [TILE - 1, TILE, TILE + 1, 2 * TILE, 2 * TILE + 5])
def test_drawing_over_tiles(size: int) -> None:
    """Equal logits: every token is equally likely, on both sides of every tile boundary."""
    drawn = drawn_from(torch.zeros(size), 5_000)
    assert int(drawn.max()) < size
    assert stats.kstest((drawn + 0.5) / size, "uniform").pvalue > 1e-4


@pytest.mark.parametrize("top_k", [0, 1, 300, 1_000])
def test_a_cut_far_from_the_likeliest_tokens_is_found(top_k: int) -> None:
    """Of 1,000 tokens more than those that are put in order first stay, equal ones among them."""
    generator = torch.Generator().manual_seed(20282)
    for spread in (0.0, 0.1, 1.0):
        logits = (torch.randn(1_000, generator=generator) * spread * 4).round() / 4
        for top_p in (0.5, 0.9, 0.9999):
            expected = distribution_of(logits.tolist(), 1.0, top_k, top_p)
            assert distribution(logits, 1.0, top_k, top_p) == pytest.approx(expected, rel=1e-5, abs=1e-9), (
                spread,
                top_p,
            )


def test_rare_tokens_keep_their_probability() -> None:
    """A tail of 150,000 tokens holds .1 together, beside one that holds .9: no mass is lost on the way."""
    size, rows = 150_000, 1_000
    logits = torch.full((1, 1, size), float(torch.log(torch.tensor(0.1 / (size - 1)))))
    logits[0, 0, 70_000] = torch.log(torch.tensor(0.9))
    p = probabilities(logits[0], temperature=1.0)[0].double()
    assert float(p[70_000]) == pytest.approx(0.9, rel=1e-6)
    assert float(p.sum()) == pytest.approx(1, abs=1e-6)
    drawn = drawn_from(logits[0, 0], rows)
    tail = drawn[drawn != 70_000]
    assert stats.binomtest(len(tail), rows, 0.1).pvalue > 1e-4
    assert stats.kstest((tail + 0.5) / size, "uniform").pvalue > 1e-4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_sampler_and_verifier_read_the_same_law_in_any_dtype(dtype: torch.dtype) -> None:
    """A draft equal to the target is always accepted: u q < p needs u < 1 exactly."""
    rows, drafted, size = 200, 3, 5000
    logits = torch.randn(rows, drafted + 1, size, generator=torch.Generator().manual_seed(5)).mul(3).to(dtype)
    shaping = (torch.full((rows,), 0.8), torch.arange(rows) % 7 * 20, torch.linspace(0.2, 1.2, rows))
    seed, position = torch.arange(rows), torch.zeros(rows, dtype=torch.int64)
    tokens = torch.stack(
        [sample_draft(logits[:, step], *shaping, seed, position + step) for step in range(drafted)], 1
    )
    result = verify_chain(
        logits, logits[:, :drafted], tokens, torch.full((rows,), drafted), *shaping, seed, position
    )
    assert result.accepted.tolist() == [drafted] * rows
    assert torch.equal(result.tokens[:, :drafted], tokens)
