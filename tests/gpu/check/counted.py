"""What Nsight Compute watches: four kernels once each, on data that no cache holds.

ncu --profile-from-start off python -m tests.gpu.check.counted
"""

from __future__ import annotations

import torch
from driftguard_engine.kernels.cuda import loader

from tests.gpu.check.linear_times import LAYERS, by_kernel
from tests.gpu.check.workload import PLAIN, SAMPLINGS, Only, batches

BATCH, DRAFTS, TOKENS = 64, 8, 5


def main() -> None:
    kernels = loader.kernels(torch.device("cuda"))
    plain = batches(kernels, kernels.device, BATCH, DRAFTS, PLAIN)
    nucleus = next(sampling for sampling in SAMPLINGS if sampling.top_p < 1)
    cut = batches(kernels, kernels.device, BATCH, 4, nucleus)
    layer = next(layer for layer in LAYERS if layer.gated)
    weight = torch.empty(layer.size, layer.inner, dtype=torch.bfloat16, device=kernels.device).normal_()
    multiply = by_kernel(kernels, layer, weight.new_empty(TOKENS, layer.inner).normal_())
    multiply(weight)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()  # type: ignore[no-untyped-call]
    plain[0].verify(kernels)  # both of its kernels; ncu empties the caches before each
    cut[0].verify(Only(kernels, "row_cut"))
    multiply(weight)
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
