"""The self-tests that decide at the engine's start whether the kernels serve."""

from __future__ import annotations

import torch
from driftguard_engine.kernels import layer_self_test, self_test
from driftguard_engine.kernels.cuda import loader
from driftguard_engine.kernels.cuda.compiler import KernelsUnavailable
from driftguard_engine.kernels.cuda.launcher import SUFFIXES, LaunchFailed

from tests.engine.kernels.layer_cases import MODEL_HEADS
from tests.gpu.check.rows import Checked
from tests.gpu.check.run import Run

# Query heads of a key head, and their size: beside the usual ones SmolLM 2's, Mistral Nemo's and Gemma's.
SHAPES = (*MODEL_HEADS, (3, 64), (4, 160), (8, 256))


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
