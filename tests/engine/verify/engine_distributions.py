"""The distributions by which the engine draws and verifies, as probabilities."""

from __future__ import annotations

import numpy as np
import torch
from driftguard_engine.kernels.reference.distribution import token_distributions
from driftguard_engine.kernels.reference.exp2 import numpy_exp2
from driftguard_engine.kernels.reference.sampling import SamplingBatch
from torch import Tensor


def probabilities(logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0) -> Tensor:
    """Of logits [N, V], float32 [N, V]."""
    rows, size = logits.shape
    asked = torch.full((rows,), temperature), torch.full((rows,), top_k), torch.full((rows,), top_p)
    sampling = SamplingBatch.of(*asked, torch.zeros(rows, dtype=torch.int64))
    steps = logits.numpy()[:, np.newaxis]
    distribution = token_distributions(steps, sampling)
    weights = distribution.weigh(steps, np.arange(size), numpy_exp2)
    return torch.from_numpy(weights / distribution.normaliser[..., np.newaxis].astype(np.float32)).squeeze(1)
