"""What compute-sanitizer watches: every kernel once in each type, on memory with nothing beside it.

compute-sanitizer python -m tests.gpu.check.sanitized
"""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import get_args

import torch
from driftguard_engine.kernels import layer_launches
from driftguard_engine.kernels.cuda import loader
from driftguard_engine.kernels.cuda.launcher import SUFFIXES
from driftguard_engine.kernels.layers import Norm
from driftguard_engine.kernels.reference.verify import Rule

from tests.engine.kernels.cases import case, certain_drafts, outcome_of, run
from tests.engine.kernels.layer_cases import Attending, normal
from tests.engine.kernels.linear_cases import DTYPES, Product


def main() -> None:
    kernels = loader.kernels(torch.device("cuda"))
    for dtype in SUFFIXES:
        for size, rule in product((257, 9001), get_args(Rule)):
            outcome_of(run(kernels, replace(case(7, 2, size, dtype), rule=rule), kernels.device))
        run_layer(kernels, dtype)
    outcome_of(run(kernels, certain_drafts(), kernels.device))
    torch.cuda.synchronize()


def run_layer(kernels: loader.Kernels, dtype: torch.dtype) -> None:
    """What has shared memory, a block at work on one thing after another."""
    x = normal(1, dtype, 3, 1000).to(kernels.device)
    layer_launches.norm(kernels, x, Norm(x[0].clone(), 1e-5), torch.empty_like(x))
    for dim in (64, 96, 128):
        Attending.make((5, 8, 2, dim), [600, 0, 251], 700, dtype, kernels.device).by_kernels(kernels, 3)
    if dtype in DTYPES:
        for tokens in (3, 13, 29):
            given = Product.make((tokens, 26, 1160), dtype, kernels.device, with_bias=True)
            given.by_kernel(kernels, given.x)
            given.gated_by_kernel(kernels)


if __name__ == "__main__":
    main()
