"""How near the weights that the kernels compute are to the exact ones."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from driftguard_engine.kernels.reference import tiles
from driftguard_engine.kernels.reference.distribution import token_distributions
from driftguard_engine.kernels.reference.exp2 import fused_exp2, numpy_exp2
from driftguard_engine.kernels.reference.sampling import LEAST_SCALE, SamplingBatch

ERROR = 2.0**-18
SCALES = [1.0, 1.4426950, 2.0610, 1442.695, 0.01]


@pytest.mark.parametrize("scale", SCALES)
def test_weights_are_near_the_exact_ones(scale: float) -> None:
    given = np.array([scale], np.float32)
    difference = np.linspace(-60 / scale, 0, 1_000_001, dtype=np.float32)
    exact = np.exp2(difference.astype(np.float64) * float(given[0]))
    weights = fused_exp2(difference, given)
    by_numpy = numpy_exp2(difference.copy(), given)
    assert np.abs(weights / exact - 1).max() < ERROR
    assert weights[-1] == 1
    assert np.abs(weights / by_numpy - 1).max() < 2 * ERROR


@pytest.mark.parametrize("scale", SCALES)
def test_a_likelier_token_weighs_no_less(scale: float) -> None:
    """Up to rounding: among neighbouring numbers around those where the nearest integer changes."""
    changes = (-(np.arange(60) + 0.5) / scale).astype(np.float32).view(np.int32)
    difference = (changes[:, np.newaxis] - np.arange(-500, 500, dtype=np.int32)).view(np.float32)
    weights = fused_exp2(difference, np.array([scale], np.float32))
    assert (difference[:, 1:] > difference[:, :-1]).all()
    assert (weights[:, 1:] / weights[:, :-1]).min() > 1 - 2.0**-21


@pytest.mark.parametrize("scale", [LEAST_SCALE, 2.0**-60, 0.7, 1.0, 1 - 2.0**-24, 1e30, 1.2e38])
def test_the_least_weight_is_next_to_nothing_and_normal(scale: float) -> None:
    difference = np.array([-np.inf, -3e38], np.float32)
    weights = fused_exp2(difference, np.array([scale], np.float32))
    assert weights.max() < 2.0**-62
    assert weights.min() >= np.finfo(np.float32).tiny


def test_probabilities_are_near_the_exact_ones() -> None:
    """Also those of tiles, each of which is weighed against its own maximum."""
    size = 6 * tiles.TILE
    logits = 4 * torch.randn(1, 1, size, generator=torch.Generator().manual_seed(3))
    zero = torch.zeros(1, dtype=torch.int64)
    sampling = SamplingBatch.of(torch.tensor([0.8]), zero, torch.ones(1), zero)
    found = token_distributions(logits.numpy(), sampling, fused_exp2)
    exact = torch.softmax(logits.double() * float(sampling.scale[0]) * np.log(2), -1)[0, 0].numpy()
    weights = found.weigh(logits.numpy(), np.arange(size), fused_exp2)[0, 0]
    assert np.abs(weights / found.normaliser[0, 0] / exact - 1).max() < 1e-5
    of_tiles = found.tile_mass[0, 0] / found.normaliser[0, 0]
    assert np.abs(of_tiles / exact.reshape(6, -1).sum(-1) - 1).max() < 1e-5
