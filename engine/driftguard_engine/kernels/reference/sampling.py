"""The sampling parameters of a batch of requests: temperature, top-k, top-p and the seed of the noise."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftguard_engine.kernels.reference.exp2 import Singles

Integers = NDArray[np.int64]
Doubles = NDArray[np.float64]
Truths = NDArray[np.bool_]
Index = NDArray[Any] | slice
EVERY = slice(None)  # row

GREEDY_BELOW = float(torch.finfo(torch.float32).tiny)  # too small to divide by in float32: counts as 0
LEAST_SCALE = 2.0**-120  # so that powers of two down to 2**-125 are differences that float32 holds
LIKELIEST = 256  # tokens among which a cut is looked for first


@dataclass(frozen=True)
class SamplingBatch:
    """How the requests of a batch sample: all [B]. top_k <= 0 or >= V is off, top_p >= 1 is off.

    Values derived from it are computed once: a batch stays the same for many steps.
    """

    temperature: Doubles
    top_k: Integers
    top_p: Doubles
    seed: Integers

    @classmethod
    def of(cls, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor) -> SamplingBatch:
        return cls(
            np.array(temperature.tolist()),
            np.array(top_k.tolist()),
            np.array(top_p.tolist(), np.float32).astype(np.float64),  # as the kernels read it
            np.array(seed.tolist()),
        )

    @cached_property
    def greedy(self) -> Truths:
        return self.temperature < GREEDY_BELOW

    @cached_property
    def any_greedy(self) -> bool:
        return bool(self.greedy.any())

    @cached_property
    def all_greedy(self) -> bool:
        return bool(self.greedy.all())

    @cached_property
    def scale(self) -> Singles:
        """Powers of two per unit of logit: [B], 0 where the row is greedy."""
        powers = math.log2(math.e) / np.maximum(self.temperature, GREEDY_BELOW)
        return np.where(self.greedy, 0, np.maximum(powers, LEAST_SCALE)).astype(np.float32)

    def limited(self, size: int) -> Truths:
        """Which rows top-k takes tokens from: [B]."""
        return (self.top_k > 0) & (self.top_k < size)

    def narrows(self, size: int) -> Truths:
        """Which rows top-k or top-p may take tokens from: [B]."""
        return self.limited(size) | (self.top_p < 1)

    def cuts(self, size: int) -> Cuts:
        """Where `token_distributions` over V = size tokens may cut tokens away."""
        if size not in self._cuts:
            self._cuts[size] = Cuts.of(self, size)
        return self._cuts[size]

    @cached_property
    def _cuts(self) -> dict[int, Cuts]:
        return {}

    def rows(self, index: Index) -> SamplingBatch:
        if isinstance(index, slice) and index == EVERY:
            return self
        return SamplingBatch(self.temperature[index], self.top_k[index], self.top_p[index], self.seed[index])


@dataclass(frozen=True, slots=True)
class Cuts:
    """The N rows of a `SamplingBatch` over V tokens from which top-k or top-p may take tokens."""

    rows: Index  # [N], EVERY where N is B
    sampling: SamplingBatch  # theirs
    limited: Truths  # [N, 1]: by top-k
    all_limited: bool  # by top-k, and they are all rows of the batch
    top_k: Integers  # [N, 1]; V where not limited
    by_mass: Truths | None  # [N, 1]: by top-p; None where no row is
    ordered: int  # tokens, the likeliest, among which a cut is looked for

    @classmethod
    def of(cls, sampling: SamplingBatch, size: int, likeliest: int = LIKELIEST) -> Cuts:
        narrows = sampling.narrows(size)
        rows = EVERY if narrows.all() else narrows.nonzero()[0]
        own = sampling.rows(rows)
        limited, by_mass = own.limited(size)[:, np.newaxis], own.top_p[:, np.newaxis] < 1
        top_k = np.where(limited, own.top_k[:, np.newaxis], size)
        ordered = int(np.where(limited, top_k, min(size, likeliest)).max(initial=0))
        all_limited = rows is EVERY and bool(limited.all())
        return cls(rows, own, limited, all_limited, top_k, by_mass if by_mass.any() else None, ordered)
