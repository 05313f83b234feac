"""What the requests of a batch ask of their tokens, checked once and kept while the batch stays the same."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from driftguard_engine.kernels.reference.distribution import Integers, Shaping
from driftguard_engine.kernels.tensor_checks import expect, expect_range


@dataclass(frozen=True, slots=True)
class Sampling:
    """Of B requests, each [B]."""

    shaping: Shaping
    seed: Integers

    @classmethod
    def of(
        cls, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, batch: int, device: torch.device
    ) -> Sampling:
        """All [batch] and on this device; what they mean: `verify.verify_chain`. Raises ValueError."""
        for name, value in (("temperature", temperature), ("top_p", top_p)):
            expect(name, value, (batch,), floating=True, device=device)
        for name, value in (("top_k", top_k), ("seed", seed)):
            expect(name, value, (batch,), floating=False, device=device)
        expect_range("temperature", temperature, 0, torch.finfo(temperature.dtype).max)
        expect_range("top_p", top_p, 0, math.inf)
        return cls(Shaping.of(temperature, top_k, top_p), np.array(seed.tolist()))
