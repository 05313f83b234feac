"""What the kernels emit on a device has the target's distribution: millions of runs against enumeration.

With 3e7 runs, a cell of probability c that is off by a factor 1 + e adds about 3e7 c e^2 to the statistic:
an error of a thousandth in a cell of a tenth adds 3, of three thousandths 27.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from driftguard_engine.kernels.cuda.loader import Kernels

from tests.engine.verify.distributions import Scenario, assert_precise, scenario
from tests.gpu.draws import assert_lossless, count, probabilities
from tests.gpu.tail import assert_tail_is_lossless

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

SEED = 20_260


def point_mass() -> Scenario:
    """An n-gram proposal: one token per context, certain under q."""
    case = scenario(6, 3, seed=10, top_p=0.9)
    proposal = case.target[:-1].topk(2, dim=-1).indices[..., 1]
    return replace(
        case, draft=torch.full_like(case.draft, -torch.inf).scatter_(2, proposal.unsqueeze(2), 0.0)
    )


CASES = {
    "temperature 0.7": scenario(7, 2, seed=2, temperature=0.7),
    "temperature 1.6": scenario(6, 2, seed=3, temperature=1.6),
    "top-k 3": scenario(8, 2, seed=4, top_k=3),
    "top-p 0.8": scenario(8, 2, seed=5, top_p=0.8),
    "all three": scenario(8, 3, seed=6, temperature=0.8, top_k=5, top_p=0.85),
    "draft equals target": replace(scenario(5, 2, seed=7), draft=scenario(5, 2, seed=7).target[:-1]),
    "draft opposes target": replace(scenario(5, 2, seed=8), draft=-2 * scenario(5, 2, seed=8).target[:-1]),
    "point mass": point_mass(),
}


def test_at_scale(engine_kernels: Kernels, draws: int) -> None:
    case = scenario(5, 3, seed=1)
    counted = count(engine_kernels, engine_kernels.device, case, draws, SEED)
    assert_lossless(counted, case, f"temperature 1, seed {SEED}")


@pytest.mark.parametrize("name", CASES)
def test_each_kind_of_law(engine_kernels: Kernels, draws: int, name: str) -> None:
    counted = count(engine_kernels, engine_kernels.device, CASES[name], draws // 10, SEED)
    assert_lossless(counted, CASES[name], f"{name}, seed {SEED}")


def test_the_tail_of_a_large_vocabulary(engine_kernels: Kernels, draws: int) -> None:
    assert_tail_is_lossless(engine_kernels, engine_kernels.device, draws // 10, SEED)


def test_normalisers_are_exact_to_float32_and_bfloat16_would_be_noticed(engine_kernels: Kernels) -> None:
    def rounded(logits: torch.Tensor, temperature: float) -> torch.Tensor:
        return probabilities(engine_kernels, engine_kernels.device, logits, temperature).bfloat16()

    def exact(logits: torch.Tensor, temperature: float) -> torch.Tensor:
        return probabilities(engine_kernels, engine_kernels.device, logits, temperature)

    assert_precise(exact, seed=SEED)
    with pytest.raises(AssertionError, match="relative error"):
        assert_precise(rounded, seed=SEED)
