"""The self-tests that decide at the engine's start whether the kernels serve."""

from __future__ import annotations

import torch
from driftguard_engine.kernels import layer_self_test, self_test
from driftguard_engine.kernels.cuda import loader
from driftguard_engine.kernels.cuda.compiler import KernelsUnavailable
from driftguard_engine.kernels.cuda.launcher import SUFFIXES, LaunchFailed

from tests.gpu.check.rows import Checked
from tests.gpu.check.run import Run

# Query heads of a key head, and their size: SmolLM 2, Llama 3.2 1B and 3B, Llama 3 8B, Llama 2 7B, Llama 3
# 70B, Mistral Nemo, Qwen 2.5 0.5B and 7B, Qwen 3 0.6B and 32B, Gemma.
SHAPES = (
    (3, 64),
    (4, 64),
    (3, 128),
    (4, 128),
    (1, 128),
    (8, 128),
    (4, 160),
    (7, 64),
    (7, 128),
    (2, 128),
    (8, 256),
)


def self_tests(run: Run) -> None:
    kernels = loader.kernels(torch.device("cuda"))
    try:
        self_test.check(kernels, kernels.device)
        run.add(Checked("self-test of verification", "passed", failed=False))
    except (KernelsUnavailable, LaunchFailed) as problem:
        run.fail("self-test of verification", problem)
    for dtype in SUFFIXES:
        refused = {
            f"{group} x {dim}": layer_self_test.failure(kernels, dtype, group, dim, kernels.device)
            for group, dim in SHAPES
        }
        told = [f"{shape}: {why}" for shape, why in refused.items() if why is not None]
        outcome = "; ".join(told) or f"passed for {len(SHAPES)} shapes of heads"
        run.add(Checked(f"self-test of the layers in {dtype}", outcome, failed=bool(told)))
        run.say(f"self-test of the layers in {dtype}: {outcome}")
