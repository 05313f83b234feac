"""From logits to a law over tokens.

Sampler and verifier both read their laws here, so that the q a token was drawn from is the q it is
tested against. Every operation works on one row alone, in an order that depends on V alone: a row's
result is bitwise the same in any batch, at any place in it, whatever the other rows ask for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from driftguard_engine.kernels import tiles
from driftguard_engine.kernels.exp2 import torch_exp2

Exp2 = Callable[[Tensor], Tensor]  # float32 in [LEAST_POWER, 0] -> float32

GREEDY_BELOW = float(torch.finfo(torch.float32).tiny)  # temperatures that float32 cannot divide by are 0
LEAST_POWER = -125.0  # of two: what is less likely weighs as much as this, so that no weight is subnormal
FIXED_BITS = 40  # behind the point of a weight, where top-p adds weights as integers


@dataclass(frozen=True, slots=True)
class Shaping:
    """What turns logits into a law, per batch row: all [B]. top_k <= 0 or >= V is off, top_p >= 1 is off."""

    temperature: Tensor  # floating
    top_k: Tensor  # int64
    top_p: Tensor  # floating

    @property
    def greedy(self) -> Tensor:
        return self.temperature < GREEDY_BELOW

    @property
    def scale(self) -> Tensor:
        """Powers of two per unit of logit: float32 [B], 0 where the row is greedy."""
        powers = (math.log2(math.e) / self.temperature.double()).float()
        return powers.masked_fill(self.greedy, 0)

    def narrows(self, size: int) -> Tensor:
        """Which rows top-k or top-p may take tokens from: bool [B]."""
        return ((self.top_k > 0) & (self.top_k < size)) | (self.top_p < 1)

    def rows(self, index: Tensor | slice) -> Shaping:
        return Shaping(self.temperature[index], self.top_k[index], self.top_p[index])


@dataclass(frozen=True, slots=True)
class Laws:
    """Laws over V tokens at S steps of B rows: weight 2 ** ((logit - peak) x scale), over the normaliser.

    A token has a weight where its logit is above `cut`, or equal to it and its id at most `cut_token`.
    """

    scale: Tensor  # [B] float32
    peak: Tensor  # [B, S] float32: the largest logit
    normaliser: Tensor  # [B, S] float64: sum of the weights
    cut: Tensor  # [B, S] float32; -inf where nothing is taken away
    cut_token: Tensor  # [B, S] int64
    tile_mass: Tensor  # [B, S, T] float64: sum of the weights in each tile, before any cut

    def weigh(self, logits: Tensor, tokens: Tensor, exp2: Exp2) -> Tensor:
        """Weights of tokens [B, S, N] (or broadcast to that) with these logits [B, S, N]: float32."""
        cut, last = self.cut.unsqueeze(-1), self.cut_token.unsqueeze(-1)
        kept = logits > cut
        if bool((cut > -torch.inf).any()):
            kept |= (logits == cut) & (tokens <= last)
        return _weights(logits, self.peak.unsqueeze(-1), self.scale, exp2) * kept

    def at(self, step: Tensor) -> Laws:
        """The laws at step[b] of row b: S = 1."""
        row = torch.arange(len(step), device=step.device)
        chosen = (values[row, step].unsqueeze(1) for values in self._of_steps())
        return Laws(self.scale, *chosen)

    def first(self, steps: int) -> Laws:
        return Laws(self.scale, *(values[:, :steps] for values in self._of_steps()))

    def probabilities(self, logits: Tensor, exp2: Exp2 = torch_exp2) -> Tensor:
        """[B, S, V] of the logits that the laws were made of: float32."""
        tokens = torch.arange(logits.shape[-1], device=logits.device)
        reciprocal = (1 / self.normaliser).float().unsqueeze(-1)
        return self.weigh(logits.float(), tokens, exp2) * reciprocal

    def _of_steps(self) -> tuple[Tensor, ...]:
        return self.peak, self.normaliser, self.cut, self.cut_token, self.tile_mass


def laws(logits: Tensor, shaping: Shaping, exp2: Exp2 = torch_exp2) -> Laws:
    """Softmax of logits [B, S, V] after temperature, then top-k, then top-p, as vLLM and transformers do.

    Every temperature must be positive. A row without a finite maximum has no law: what it gives is
    meaningless, but harms no other row.
    """
    scale = shaping.scale
    size = logits.shape[-1]
    chunks = tiles.chunked(logits.float(), -torch.inf)
    maxima = tiles.tile_maxima(chunks)
    peak = maxima.amax(-1)
    # Each tile is weighed against its own maximum, so that a kernel needs to read it only once.
    own = tiles.per_chunk(maxima.masked_fill(maxima == -torch.inf, 0), chunks.shape[-2])
    sums = tiles.tile_sums(tiles.clear_unread(_weights(chunks, own, scale, exp2), size))
    mass = sums.double() * _weights(maxima, peak.unsqueeze(-1), scale, exp2).double()
    whole = Laws(
        scale,
        peak,
        tiles.row_sum(mass),
        torch.full_like(peak, -torch.inf),
        torch.full_like(peak, -1, dtype=torch.int64),
        mass,
    )
    narrows = shaping.narrows(size)
    if not bool(narrows.any()):
        return whole
    chosen = narrows.nonzero().squeeze(1)
    cut, cut_token, normaliser = _cut(logits.float()[chosen], whole, chosen, shaping.rows(chosen), exp2)
    return replace(
        whole,
        cut=whole.cut.index_copy(0, chosen, cut),
        cut_token=whole.cut_token.index_copy(0, chosen, cut_token),
        normaliser=whole.normaliser.index_copy(0, chosen, normaliser),
    )


def _weights(logits: Tensor, peak: Tensor, scale: Tensor, exp2: Exp2) -> Tensor:
    """logits [B, ...], peak (broadcast): subtracted first, because logits x scale overflows."""
    per_row = scale.reshape(-1, *[1] * (logits.dim() - 1))
    return exp2((logits - peak).mul_(per_row).clamp_(min=LEAST_POWER))


def _cut(
    logits: Tensor, whole: Laws, rows: Tensor, shaping: Shaping, exp2: Exp2
) -> tuple[Tensor, Tensor, Tensor]:
    """Cut, its token and the normaliser of logits [B, S, V], all [B, S]: where the last token stays.

    top-p keeps a token while the likelier ones hold less than top_p of what top-k left; so one always stays.
    Among equal logits the lower token id stays. Weights are added as integers: the order cannot matter.
    """
    size = logits.shape[-1]
    ordered = _descending(logits)
    weights = _weights(ordered, ordered[..., :1], shaping.scale, exp2)
    held = torch.ldexp(weights.double(), torch.tensor(FIXED_BITS)).long().cumsum(-1)
    possible = (ordered > -torch.inf).sum(-1, keepdim=True).clamp(min=1)  # also in a row without a law
    top_k, top_p = shaping.top_k.reshape(-1, 1, 1), shaping.top_p.double().reshape(-1, 1, 1)
    limited = (top_k > 0) & (top_k < size)
    count = torch.where(limited, top_k.minimum(possible), possible)
    if bool((top_p < 1).any()):
        of_all = torch.ldexp(whole.normaliser[rows], torch.tensor(FIXED_BITS)).unsqueeze(-1)
        total = torch.where(limited, held.gather(2, count - 1).double(), of_all)
        nucleus = 1 + (held.double() < top_p * total).sum(-1, keepdim=True)
        count = torch.where(top_p < 1, count.minimum(nucleus), count)

    cut = ordered.gather(2, count - 1)
    tied = (logits == cut).cumsum(-1)
    staying = count - (logits > cut).sum(-1, keepdim=True)
    token = torch.searchsorted(tied, staying)
    normaliser = torch.ldexp(held.gather(2, count - 1).double(), torch.tensor(-FIXED_BITS))
    return cut.squeeze(-1), token.squeeze(-1), normaliser.squeeze(-1)


def _descending(values: Tensor) -> Tensor:
    if values.device.type != "cpu":
        return values.sort(dim=-1, descending=True).values
    # numpy sorts values with SIMD, 30 times faster than torch.sort; sorted values have only one answer.
    return torch.from_numpy(np.sort(values.numpy(), axis=-1)[..., ::-1].copy())
