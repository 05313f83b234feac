"""From logits to a law over tokens, in numpy, whose calls on few rows take a fraction of torch's time.

Sampler and verifier both read their laws here, so that the q a token was drawn from is the q it is
tested against. Every operation works on one row alone, in an order that depends on V alone: a row's
result is bitwise the same in any batch, at any place in it, whatever the other rows ask for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from driftguard_engine.kernels import tiles
from driftguard_engine.kernels.exp2 import Singles, numpy_exp2

Integers = NDArray[np.int64]
Doubles = NDArray[np.float64]
Truths = NDArray[np.bool_]
Index = NDArray[Any] | slice
Exp2 = Callable[[Singles], Singles]  # of powers in [LEAST_POWER, 0], which it may overwrite

GREEDY_BELOW = float(torch.finfo(torch.float32).tiny)  # temperatures that float32 cannot divide by are 0
LEAST_POWER = np.float32(-125)  # of two: what is less likely weighs as much, so that no weight is subnormal
LIKELIEST = 256  # tokens among which a cut is looked for first
FIXED_BITS = 40  # behind the point of a weight, where top-p adds weights as integers


@dataclass(frozen=True, slots=True)
class Shaping:
    """What turns logits into a law, per batch row: all [B]. top_k <= 0 or >= V is off, top_p >= 1 is off."""

    temperature: Doubles
    top_k: Integers
    top_p: Doubles

    @classmethod
    def of(cls, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Shaping:
        # top_p as the kernels read it: in float32, whatever it came in.
        given = (temperature.double(), top_k.long(), top_p.float().double())
        return cls(*(values.cpu().numpy() for values in given))

    @property
    def greedy(self) -> Truths:
        return self.temperature < GREEDY_BELOW

    @property
    def scale(self) -> Singles:
        """Powers of two per unit of logit: [B], 0 where the row is greedy."""
        powers = math.log2(math.e) / np.maximum(self.temperature, GREEDY_BELOW)
        return np.where(self.greedy, 0, powers).astype(np.float32)

    def narrows(self, size: int) -> Truths:
        """Which rows top-k or top-p may take tokens from: [B]."""
        return ((self.top_k > 0) & (self.top_k < size)) | (self.top_p < 1)

    def rows(self, index: Index) -> Shaping:
        return Shaping(self.temperature[index], self.top_k[index], self.top_p[index])


@dataclass(frozen=True, slots=True)
class Laws:
    """Laws over V tokens at S steps of B rows: weight 2 ** ((logit - peak) x scale), over the normaliser.

    A token has a weight where its logit is above `cut`, or equal to it and its id at most `cut_token`.
    """

    scale: Singles  # [B]
    peak: Singles  # [B, S]: the largest logit
    normaliser: Doubles  # [B, S]: sum of the weights
    cut: Singles  # [B, S]; -inf where nothing is taken away
    cut_token: Integers  # [B, S]
    tile_mass: Doubles  # [B, S, T]: sum of the weights in each tile, before any cut

    def weigh(self, logits: Singles, tokens: Integers, exp2: Exp2) -> Singles:
        """Weights of tokens [B, S, N] (or broadcast to that) with these logits [B, S, N]."""
        cut = self.cut[..., np.newaxis]
        kept = logits > cut
        if (self.cut > -np.inf).any():
            kept |= (logits == cut) & (tokens <= self.cut_token[..., np.newaxis])
        weights = _weights(logits, self.peak[..., np.newaxis], self.scale, exp2)
        weights *= kept
        return weights

    def at(self, step: Integers) -> Laws:
        """The laws at step[b] of row b: S = 1."""
        row = np.arange(len(step))
        chosen = (values[row, step][:, np.newaxis] for values in self._of_steps())
        return Laws(self.scale, *chosen)

    def first(self, steps: int) -> Laws:
        return Laws(self.scale, *(values[:, :steps] for values in self._of_steps()))

    def _of_steps(self) -> tuple[NDArray[Any], ...]:
        return self.peak, self.normaliser, self.cut, self.cut_token, self.tile_mass


def laws(logits: Singles, shaping: Shaping, exp2: Exp2 = numpy_exp2) -> Laws:
    """Softmax of logits [B, S, V] after temperature, then top-k, then top-p, as vLLM and transformers do.

    Every temperature must be positive. A row without a finite maximum has no law: what it gives is
    meaningless, but harms no other row.
    """
    scale, size = shaping.scale, logits.shape[-1]
    chunks = tiles.chunked(logits, -np.inf)
    maxima = tiles.tile_maxima(chunks)
    peak = maxima.max(-1)
    # Each tile is weighed against its own maximum, so that a kernel needs to read it only once.
    own = tiles.per_chunk(np.where(maxima == -np.inf, np.float32(0), maxima), chunks.shape[-2])
    sums = tiles.tile_sums(tiles.clear_unread(_weights(chunks, own, scale, exp2), size))
    mass = sums.astype(np.float64)
    mass *= _weights(maxima, peak[..., np.newaxis], scale, exp2)
    normaliser, cut = tiles.row_sum(mass), np.full_like(peak, -np.inf)
    cut_token = np.full(peak.shape, -1, np.int64)
    narrows = shaping.narrows(size)
    if narrows.any():
        rows = narrows.nonzero()[0]
        cut[rows], cut_token[rows], normaliser[rows] = _cut(
            logits[rows], normaliser[rows], shaping.rows(rows), exp2
        )
    return Laws(scale, peak, normaliser, cut, cut_token, mass)


def _weights(logits: Singles, peak: Singles, scale: Singles, exp2: Exp2) -> Singles:
    """logits [B, ...], peak (broadcast): subtracted first, because logits x scale overflows."""
    power = logits - peak
    power *= scale.reshape(-1, *[1] * (power.ndim - 1))
    return exp2(np.maximum(power, LEAST_POWER, out=power))


def _cut(
    logits: Singles, normaliser: Doubles, shaping: Shaping, exp2: Exp2, likeliest: int = LIKELIEST
) -> tuple[Singles, Integers, Doubles]:
    """Cut, its token and the normaliser of logits [B, S, V], all [B, S]: where the last token stays.

    top-p keeps a token while the likelier ones hold less than top_p of what top-k left; so one always stays.
    Among equal logits the lower token id stays. Weights are added as integers: the order cannot matter.
    Only the `likeliest` tokens are put in order, and all of them where the cut is not among those.
    """
    size = logits.shape[-1]
    top_k, top_p = shaping.top_k.reshape(-1, 1, 1), shaping.top_p.reshape(-1, 1, 1)
    limited = (top_k > 0) & (top_k < size)
    first = size - min(size, max(likeliest, int(np.where(limited, top_k, 0).max())))
    chosen = logits if first == 0 else np.partition(logits, first, axis=-1)[..., first:]
    ordered = np.sort(chosen, axis=-1)[..., ::-1]
    weights = _weights(ordered, ordered[..., :1], shaping.scale, exp2)
    held = np.ldexp(weights.astype(np.float64), FIXED_BITS).astype(np.int64).cumsum(-1)
    possible = np.maximum((logits > -np.inf).sum(-1, keepdims=True), 1)  # also in a row without a law
    count = np.where(limited, np.minimum(top_k, possible), possible)
    if (shaping.top_p < 1).any():
        of_all = np.ldexp(normaliser, FIXED_BITS)[..., np.newaxis]
        last = np.minimum(count, size - first) - 1
        total = np.where(limited, np.take_along_axis(held, last, 2).astype(np.float64), of_all)
        nucleus = 1 + (held.astype(np.float64) < top_p * total).sum(-1, keepdims=True)
        count = np.where(top_p < 1, np.minimum(count, nucleus), count)
    beyond = (count > size - first).any((1, 2))  # rows [B]
    cut, token, kept = _cut_at(logits, ordered, held, np.minimum(count, size - first))
    if beyond.any():
        rows = beyond.nonzero()[0]
        cut[rows], token[rows], kept[rows] = _cut(
            logits[rows], normaliser[rows], shaping.rows(rows), exp2, size
        )
    return cut, token, kept


def _cut_at(
    logits: Singles, ordered: Singles, held: Integers, count: Integers
) -> tuple[Singles, Integers, Doubles]:
    """What `_cut` tells where count [B, S, 1] tokens stay. held: weights of as many of the ordered ones."""
    cut = np.take_along_axis(ordered, count - 1, 2)
    staying = count - (logits > cut).sum(-1, keepdims=True)
    token = ((logits == cut).cumsum(-1) < staying).sum(-1)
    kept = np.ldexp(np.take_along_axis(held, count - 1, 2).astype(np.float64), -FIXED_BITS)
    return cut[..., 0], token, kept[..., 0]
