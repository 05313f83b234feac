"""From logits to distributions over tokens, in numpy: on few rows its calls take a fraction of torch's time.

Sampler and verifier both read their distributions here, so that the q a token was drawn from is the q it is
tested against. Every operation works on one row alone, in an order that depends on V alone: a row's
result is bitwise the same in any batch, at any place in it, whatever the other rows ask for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from driftguard_engine.kernels.reference import tiles
from driftguard_engine.kernels.reference.exp2 import Singles, numpy_exp2
from driftguard_engine.kernels.reference.sampling import Cuts, Doubles, Index, Integers, SamplingBatch

Exp2 = Callable[[Singles, Singles], Singles]  # 2 ** (difference x scale) as `numpy_exp2`

FIXED = np.float64(2**40)  # a weight of 1 as an integer: top-p adds weights in fixed point
_LOWEST = np.finfo(np.float32).min


@cache
def _distribution_dtype(size: int) -> np.dtype[np.void]:
    """One distribution over V tokens."""
    tile_mass = ("tile_mass", np.float64, (tiles.tiles_of(size),))
    singles = [("peak", np.float32), ("cut", np.float32)]
    return np.dtype([*singles, ("normaliser", np.float64), ("cut_token", np.int64), tile_mass])


@dataclass(frozen=True, slots=True)
class TokenDistributions:
    """Over V tokens at S steps of B rows: weight 2 ** ((logit - peak) x scale), over the normaliser.

    A token has a weight where its logit is above `cut`, or equal to it and its id at most `cut_token`.
    """

    scale: Singles  # [B]
    of_steps: NDArray[np.void]  # [B, S], whose fields are the properties below

    @property
    def peak(self) -> Singles:
        """[B, S]: the largest logit."""
        return self.of_steps["peak"]

    @property
    def normaliser(self) -> Doubles:
        """[B, S]: sum of the weights."""
        return self.of_steps["normaliser"]

    @property
    def cut(self) -> Singles:
        """[B, S]: the lowest logit that is kept; -inf where all are."""
        return self.of_steps["cut"]

    @property
    def cut_token(self) -> Integers:
        """[B, S]"""
        return self.of_steps["cut_token"]

    @property
    def tile_mass(self) -> Doubles:
        """[B, S, T]: sum of the weights in each tile, 0 where top-k cuts. Valid only where nothing is cut."""
        return self.of_steps["tile_mass"]

    def weigh(self, logits: Singles, tokens: Integers, exp2: Exp2) -> Singles:
        """Weights of tokens [B, S, N] (or broadcast to that) with these logits [B, S, N]."""
        cut = self.cut[..., np.newaxis]
        kept = logits > cut
        if (self.cut > -np.inf).any():
            kept |= (logits == cut) & (tokens <= self.cut_token[..., np.newaxis])
        weights = _weights(logits, self.peak[..., np.newaxis], self.scale, exp2)
        weights *= kept
        return weights

    @classmethod
    def certain(cls, sampling: SamplingBatch, steps: int, size: int) -> TokenDistributions:
        """Point masses (logit 0 at a token, -inf elsewhere), which top-k and top-p do not change.

        Their tile masses are not computed: they are read only to draw a token.
        """
        of_steps = np.empty((len(sampling.top_k), steps), _distribution_dtype(size))
        of_steps[...] = (0, -np.inf, 1, -1, 0)
        return cls(sampling.scale, of_steps)

    def put(self, rows: Index, steps: slice, found: TokenDistributions) -> None:
        """Stores distributions of the same batch at these rows and steps."""
        self.of_steps[rows, steps] = found.of_steps

    def beside(self, others: TokenDistributions) -> TokenDistributions:
        """These distributions followed by others of the same rows: [B, S + S']."""
        (rows, own), further = self.of_steps.shape, others.of_steps.shape[1]
        of_steps = np.empty((rows, own + further), self.of_steps.dtype)  # faster than numpy's concatenate
        of_steps[:, :own], of_steps[:, own:] = self.of_steps, others.of_steps
        return TokenDistributions(self.scale, of_steps)

    def rows(self, index: Index, steps: slice = slice(None)) -> TokenDistributions:
        return TokenDistributions(self.scale[index], self.of_steps[index, steps])

    def at(self, step: Integers) -> TokenDistributions:
        """The distributions at steps step[b] of row b: [B, N], S = N."""
        return TokenDistributions(self.scale, self.of_steps[np.arange(len(step))[:, np.newaxis], step])


def token_distributions(
    logits: Singles, sampling: SamplingBatch, exp2: Exp2 = numpy_exp2
) -> TokenDistributions:
    """Softmax of logits [B, S, V] after temperature, then top-k, then top-p, as vLLM and transformers do.

    Every temperature must be positive. A row without a finite maximum has no distribution: its result is
    meaningless, but affects no other row.
    """
    size = logits.shape[-1]
    cuts, maxima = sampling.cuts(size), tiles.tile_maxima(logits)
    peak = maxima.max(-1)
    found = TokenDistributions(sampling.scale, np.empty(peak.shape, _distribution_dtype(size)))
    found.peak[...], found.cut[...], found.cut_token[...] = peak, -np.inf, -1
    if cuts.all_limited:
        found.normaliser[...], found.tile_mass[...] = 0, 0  # `_cut` adds up the few weights that stay
    else:
        mass = _tile_mass(logits, maxima, peak, sampling.scale, exp2)
        found.normaliser[...] = tiles.row_sum(mass)
        if cuts.ordered:  # a row's distribution is the same whatever the other rows ask for
            mass[sampling.limited(size)] = 0
        found.tile_mass[...] = mass
    if cuts.ordered:
        found.cut[cuts.rows], found.cut_token[cuts.rows], found.normaliser[cuts.rows] = _cut(
            logits[cuts.rows], found.normaliser[cuts.rows], cuts, exp2
        )
    return found


def uncut_tile_mass(logits: Singles, scale: Singles, exp2: Exp2) -> Doubles:
    """Sum of the weights in each tile of logits [B, V], whatever is cut: [B, T]. scale [B]."""
    maxima = tiles.tile_maxima(logits)
    return _tile_mass(logits, maxima, maxima.max(-1), scale, exp2)


def _tile_mass(logits: Singles, maxima: Singles, peak: Singles, scale: Singles, exp2: Exp2) -> Doubles:
    """Sum of the weights in each tile of logits [B, S, V], from their maxima: [B, S, T]."""
    size = logits.shape[-1]
    chunks = tiles.chunked(logits, -np.inf)
    # Each tile is weighed against its own maximum, so that a kernel needs to read it only once. -inf minus
    # -inf would be NaN.
    own = tiles.per_chunk(np.maximum(maxima, _LOWEST), chunks.shape[-2])
    sums = tiles.tile_sums(tiles.clear_unread(_weights(chunks, own, scale, exp2), size))
    mass = sums.astype(np.float64)
    if mass.shape[-1] > 1:
        mass *= _weights(maxima, peak[..., np.newaxis], scale, exp2)
    return mass


def _weights(logits: Singles, peak: Singles, scale: Singles, exp2: Exp2) -> Singles:
    """logits [B, ...], peak (broadcast): subtracted first, because logits x scale overflows."""
    difference = logits - peak
    return exp2(difference, scale.reshape(-1, *[1] * (difference.ndim - 1)))


def _cut(logits: Singles, normaliser: Doubles, cuts: Cuts, exp2: Exp2) -> tuple[Singles, Integers, Doubles]:
    """Cut, its token and the normaliser of logits [N, S, V], all [N, S]: where the last token stays.

    top-p keeps a token while the likelier ones hold less than top_p of what top-k left; so one always stays.
    Among equal logits the lower token id stays. Weights are added as integers: the order cannot matter.
    Only the likeliest tokens are sorted, and all of them where the cut is not among those. The normaliser
    given is used where top-k does not cut.
    """
    size, most = logits.shape[-1], cuts.ordered
    chosen = logits if most == size else np.partition(logits, size - most, axis=-1)[..., size - most :]
    ordered = np.sort(chosen, axis=-1)[..., ::-1]
    weights = _weights(ordered, ordered[..., :1], cuts.sampling.scale, exp2)
    held = (weights * FIXED).astype(np.int64).cumsum(-1)
    count = np.repeat(cuts.top_k, logits.shape[1], axis=1)  # [N, S]
    if not (ordered[..., -1] > -np.inf).all():  # a row has fewer tokens
        present = (ordered > -np.inf).sum(-1)
        possible = np.where(
            present < most, np.maximum(present, 1), size
        )  # 1: in a row without a distribution
        count = np.minimum(count, possible)
    if cuts.by_mass is not None:
        of_limited = held[_last(np.minimum(count, most))]
        total = np.where(cuts.limited, of_limited, normaliser * FIXED)
        nucleus = 1 + (held < (cuts.sampling.top_p[:, np.newaxis] * total)[..., np.newaxis]).sum(-1)
        count = np.where(cuts.by_mass, np.minimum(count, nucleus), count)
    cut, token, kept = _cut_at(logits, ordered, held, np.minimum(count, most))
    if not cuts.all_limited and len(rows := np.flatnonzero((count > most).any(-1))):
        among_all = Cuts.of(cuts.sampling.rows(rows), size, likeliest=size)
        cut[rows], token[rows], kept[rows] = _cut(logits[rows], normaliser[rows], among_all, exp2)
    return cut, token, kept


def _cut_at(
    logits: Singles, ordered: Singles, held: Integers, count: Integers
) -> tuple[Singles, Integers, Doubles]:
    """The result of `_cut` where count [B, S] tokens stay. held: weights of the first ordered ones."""
    last = _last(count)
    cut = ordered[last]
    equal = logits == cut[..., np.newaxis]
    token = equal.argmax(-1)
    staying = count - (ordered > cut[..., np.newaxis]).sum(-1)
    if (shared := staying > 1).any():  # the last of several equal ones that stay
        token[shared] = (equal[shared].cumsum(-1) < staying[shared, np.newaxis]).sum(-1)
    return cut, token, held[last] / FIXED


def _last(count: Integers) -> tuple[Integers, Integers, Integers]:
    """Where the last of the first count [B, S] is along the last axis of [B, S, N]."""
    rows, steps = count.shape
    return np.arange(rows)[:, np.newaxis], np.arange(steps), count - 1
