"""Every known mistake, planted on the device, is caught there by the checks that the kernels pass."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.cuda.loader import Kernels

from tests.engine.verify.distributions import Scenario, scenario
from tests.gpu.draws import Mistake, assert_lossless, count
from tests.gpu.planted import EDITS, GIVEN, edited_sources, mistaken_kernels

on_a_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

SEED = 20_270
CASES = {
    "acceptance x 1.02": Scenario(
        torch.tensor([0.45, 0.55]).log().expand(2, 2, 2), torch.tensor([0.9, 0.1]).log().expand(1, 2, 2)
    ),
    "q before top-k, p after": scenario(6, 2, seed=21, top_k=3),
    "greedy draft with a soft q": Scenario(
        torch.tensor([0.5, -0.3, 0.8, 0.0, 0.1]).expand(2, 5, 5),
        torch.tensor([0.9, 0.2, 0.1, 0.0, -0.6]).expand(1, 5, 5),
    ),
    "any other": scenario(5, 2, seed=22),
}


def assert_caught(
    name: str, launcher: Launcher, device: torch.device, draws: int, mistake: Mistake | None = None
) -> None:
    case = CASES.get(name, CASES["any other"])
    counted = count(launcher, device, case, draws, SEED, mistake)
    with pytest.raises(AssertionError, match=r"chi-square|rules out"):
        assert_lossless(counted, case, name)


@cache
def assert_passes(name: str, kernels: Kernels, draws: int) -> None:
    """The same case, runs and seed without the mistake."""
    counted = count(kernels, kernels.device, CASES[name], draws, SEED)
    assert_lossless(counted, CASES[name], name)


@pytest.mark.gpu
@on_a_gpu
@pytest.mark.parametrize("name", [*EDITS, *GIVEN])
def test_is_caught(engine_kernels: Kernels, draws: int, name: str) -> None:
    device, draws = engine_kernels.device, max(draws // 10, 600_000)
    assert_passes(name if name in CASES else "any other", engine_kernels, draws)
    kernels = mistaken_kernels(name, device) if name in EDITS else engine_kernels
    assert_caught(name, kernels, device, draws, GIVEN.get(name))


def test_every_edit_still_finds_its_line() -> None:
    for edit in EDITS.values():
        assert edited_sources(edit)
