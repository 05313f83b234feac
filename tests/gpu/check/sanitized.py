"""What compute-sanitizer watches: every kernel once in each type, on memory with nothing beside it.

compute-sanitizer python -m tests.gpu.check.sanitized
"""

from __future__ import annotations

import torch
from driftguard_engine.kernels import launches, loader

from tests.engine.kernels.cases import case, certain_drafts, outcome_of, run


def main() -> None:
    kernels = loader.kernels(torch.device("cuda"))
    for dtype in launches.SUFFIXES:
        for size in (257, 9001):
            outcome_of(run(kernels, case(7, 2, size, dtype), kernels.device))
    outcome_of(run(kernels, certain_drafts(), kernels.device))
    torch.cuda.synchronize()


if __name__ == "__main__":
    main()
