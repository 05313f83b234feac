"""Top-k, top-p, ties, -inf and precision, over whatever logits hypothesis thinks of."""

from __future__ import annotations

import pytest
import torch
from driftguard_engine.kernels.distribution import TILE, Shaping, distribution, inverse_cdf
from driftguard_engine.verify import sample_draft, verify_chain
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.engine.verify.laws import law_of

# Few distinct values, so that ties are the rule; some tokens ruled out.
LOGITS = st.lists(
    st.sampled_from([-torch.inf, -3.0, -1.5, -0.5, 0.0, 0.25, 1.0, 2.0]), min_size=1, max_size=40
).filter(lambda logits: max(logits) > -torch.inf)
# top_p away from sums that these logits reach exactly: there the last bit of a sum decides.
TOP_P = st.sampled_from([0.0, 1e-9, 0.0613, 0.3217, 0.6841, 0.8899, 0.99713, 1.0, 1.5])


def law(logits: Tensor, temperature: float, top_k: int, top_p: float) -> list[float]:
    shaping = Shaping(
        torch.tensor([temperature]), torch.tensor([top_k]), torch.tensor([top_p], dtype=torch.float64)
    )
    return distribution(logits.reshape(1, 1, -1), shaping).at_step(torch.tensor([0]))[0].tolist()


@given(
    logits=LOGITS, temperature=st.sampled_from([0.1, 0.7, 1.0, 3.0]), top_k=st.integers(-1, 45), top_p=TOP_P
)
@settings(max_examples=300, deadline=None)
def test_law_equals_the_one_on_paper(
    logits: list[float], temperature: float, top_k: int, top_p: float
) -> None:
    found = law(torch.tensor(logits), temperature, top_k, top_p)
    assert found == pytest.approx(law_of(logits, temperature, top_k, top_p), abs=1e-6)


@given(
    weights=st.lists(st.sampled_from([0.0, 0.0, 1e-30, 0.1, 1.0, 7.0]), min_size=1, max_size=50).filter(any),
    uniform=st.sampled_from([0.0, 2.0**-53, 0.25, 0.5, 1 - 2.0**-53]) | st.floats(0, 1, exclude_max=True),
)
@settings(max_examples=300, deadline=None)
def test_inverse_cdf_picks_a_token_that_has_mass(weights: list[float], uniform: float) -> None:
    mass = torch.tensor([weights], dtype=torch.float64)
    token = int(inverse_cdf(mass, torch.tensor([uniform], dtype=torch.float64)))
    assert weights[token] > 0
    total = sum(weights)
    assert sum(weights[:token]) <= uniform * total * (1 + 1e-12)
    assert sum(weights[: token + 1]) >= uniform * total * (1 - 1e-12)


@pytest.mark.parametrize("size", [TILE - 1, TILE, TILE + 1, 3 * TILE, 3 * TILE + 5])
def test_inverse_cdf_over_tiles(size: int) -> None:
    """With equal masses the token is the uniform's own place, across every tile boundary."""
    place = torch.tensor([0, 1, TILE - 2, TILE - 1, TILE, TILE + 1, size - 1])
    place = place[place < size]
    mass = torch.ones(len(place), size)
    assert torch.equal(inverse_cdf(mass, (place.double() + 0.5) / size), place)
    only = torch.zeros(len(place), size).scatter_(1, place.unsqueeze(1), 1e-20)
    for uniform in (0.0, 0.3, 1 - 2.0**-53):
        assert torch.equal(inverse_cdf(only, torch.full((len(place),), uniform, dtype=torch.float64)), place)


@pytest.mark.parametrize("size", [3000, TILE + 100])
def test_inverse_cdf_where_two_orders_of_addition_differ(size: int) -> None:
    """The largest uniform, where a running sum may end below or above the tile's own: the last token."""
    mass = torch.rand(200, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    last = torch.full((200,), 1 - 2.0**-53, dtype=torch.float64)
    assert inverse_cdf(mass, last).tolist() == [size - 1] * 200
    smallest = torch.tensor([[0.0, 5e-324, 0.0]], dtype=torch.float64)
    assert inverse_cdf(smallest, last[:1]).tolist() == [1]


def test_rare_tokens_keep_their_probability() -> None:
    """A tail of 150,000 tokens holds .1 together, beside one that holds .9: no mass is lost on the way."""
    size = 150_000
    tail = torch.log(torch.tensor(0.1 / (size - 1)))
    logits = torch.full((1, 1, size), float(tail))
    logits[0, 0, 70_000] = torch.log(torch.tensor(0.9))
    shaping = Shaping(torch.ones(1), torch.zeros(1, dtype=torch.int64), torch.ones(1))
    p = distribution(logits, shaping).at_step(torch.tensor([0]))
    assert float(p[0, 70_000]) == pytest.approx(0.9, rel=1e-6)
    assert float(p.sum()) == pytest.approx(1, abs=1e-12)
    uniform = torch.tensor([0.02, 0.5, 0.96], dtype=torch.float64)
    drawn = inverse_cdf(p.expand(3, -1), uniform)
    below = 70_000 * 0.1 / (size - 1)
    expected = [0.02 / (0.1 / (size - 1)), 70_000, 70_001 + (0.96 - 0.9 - below) / (0.1 / (size - 1))]
    assert drawn.tolist() == pytest.approx(expected, abs=2)


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
