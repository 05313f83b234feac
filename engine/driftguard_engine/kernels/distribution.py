"""From logits to a law over tokens, and from a law and one uniform to a token.

Sampler and verifier both read their laws here, so that the q a token was drawn from is the q it is
tested against. Every operation works on one row alone, in an order that depends on V alone: a row's
result is bitwise the same in any batch, at any place in it, whatever the other rows ask for.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TILE = 4096  # elements summed together; fixed, so that the order of additions never follows the batch
GREEDY_BELOW = float(torch.finfo(torch.float32).tiny)  # temperatures that float32 cannot divide by are 0


@dataclass(frozen=True, slots=True)
class Shaping:
    """What turns logits into a law, per batch row: all [B]. top_k <= 0 or >= V is off, top_p >= 1 is off."""

    temperature: Tensor  # floating
    top_k: Tensor  # int64
    top_p: Tensor  # floating

    @property
    def greedy(self) -> Tensor:
        return self.temperature < GREEDY_BELOW

    def rows(self, index: Tensor | slice) -> Shaping:
        return Shaping(self.temperature[index], self.top_k[index], self.top_p[index])


@dataclass(frozen=True, slots=True)
class Distribution:
    """Laws over V tokens at S steps of B rows: p = weights / normaliser. The likeliest token weighs 1."""

    weights: Tensor  # [B, S, V], float32 (float64 for float64 logits)
    normaliser: Tensor  # [B, S], float64

    def of_tokens(self, tokens: Tensor) -> Tensor:
        """Probability of tokens [B, <= S] at the first steps: float64, same shape."""
        steps = tokens.shape[1]
        weight = self.weights[:, :steps].gather(2, tokens.unsqueeze(2)).squeeze(2)
        return weight.double() / self.normaliser[:, :steps]

    def at_step(self, step: Tensor) -> Tensor:
        """All probabilities at step[b] of row b: float64 [B, V]."""
        row = torch.arange(len(step), device=step.device)
        return self.weights[row, step].double() / self.normaliser[row, step].unsqueeze(1)


def distribution(logits: Tensor, shaping: Shaping) -> Distribution:
    """Softmax of logits [B, S, V] after temperature, then top-k, then top-p, as vLLM and transformers do."""
    mass = weights(logits, shaping)
    return Distribution(mass, _tile_sums(mass).cumsum(-1)[..., -1])


def weights(logits: Tensor, shaping: Shaping) -> Tensor:
    """`Distribution.weights` of logits [B, S, V]: enough to draw from a law.

    Every temperature must be positive. A row without a finite maximum has no law: what it gives is
    meaningless, but harms no other row.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    # The maximum is subtracted before dividing: logits / temperature overflows where this does not.
    mass = _exponentials(logits, logits.amax(-1, keepdim=True), shaping.temperature)
    narrows = ((shaping.top_k > 0) & (shaping.top_k < logits.shape[-1])) | (shaping.top_p < 1)
    if bool(narrows.any()):
        chosen = slice(None) if bool(narrows.all()) else narrows.nonzero().squeeze(1)
        mass[chosen] *= _kept(logits[chosen], shaping.rows(chosen))
    return mass


def inverse_cdf(mass: Tensor, uniform: Tensor) -> Tensor:
    """First token whose cumulative mass exceeds uniform x total: int64 [B].

    mass [B, V]: not negative, with a positive total in every row; uniform [B]: float64 in [0, 1).
    Rounding leads neither past the last token with mass nor to one without: each threshold is held
    below the total that it is compared with.
    """
    tiles = _tile_sums(mass).cumsum(-1)  # [B, tiles]
    threshold = _hold_below(uniform.unsqueeze(1) * tiles[:, -1:], tiles[:, -1:])
    tile = torch.searchsorted(tiles, threshold, right=True)  # [B, 1]
    before = tiles.gather(1, (tile - 1).clamp_(min=0)).masked_fill_(tile == 0, 0)

    inside = _take_tile(mass, tile).cumsum(-1, dtype=torch.float64)  # [B, <= TILE]
    threshold = _hold_below(threshold - before, inside[:, -1:])
    return (tile * TILE + torch.searchsorted(inside, threshold, right=True)).squeeze(1)


def _exponentials(logits: Tensor, peak: Tensor, temperature: Tensor) -> Tensor:
    # Contiguous, because the order in which sums add follows the memory's layout.
    return (logits - peak).contiguous().div_(temperature.to(logits.dtype).reshape(-1, 1, 1)).exp_()


def _kept(logits: Tensor, shaping: Shaping) -> Tensor:
    """Which tokens top-k and top-p leave: bool [B, S, V]. Among equal logits the lower token id stays.

    top-p keeps a token while the likelier ones hold less than top_p of what top-k left; so one always stays.
    """
    size = logits.shape[-1]
    ordered = _descending(logits)
    top_k, top_p = shaping.top_k.reshape(-1, 1, 1), shaping.top_p.double().reshape(-1, 1, 1)
    count = torch.where((top_k > 0) & (top_k < size), top_k, size).expand(*logits.shape[:2], 1)  # tokens kept
    if bool((top_p < 1).any()):
        held = _exponentials(ordered, ordered[..., :1], shaping.temperature).cumsum(-1, dtype=torch.float64)
        nucleus = 1 + (held < top_p * held.gather(2, count - 1)).sum(-1, keepdim=True)
        count = torch.where(top_p < 1, torch.minimum(count, nucleus), count)

    cutoff = ordered.gather(2, count - 1)
    kept = logits >= cutoff
    if bool((kept.sum(-1, keepdim=True) > count).any()):  # more logits equal the cutoff than may stay
        tied = logits == cutoff
        above = kept & ~tied
        kept = above | (tied & (tied.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    return kept


def _descending(values: Tensor) -> Tensor:
    if values.device.type != "cpu":
        return values.sort(dim=-1, descending=True).values
    # numpy sorts values with SIMD, 30 times faster than torch.sort; sorted values have only one answer.
    return torch.from_numpy(np.sort(values.numpy(), axis=-1)[..., ::-1].copy())


def _tile_sums(mass: Tensor) -> Tensor:
    """Sum of each TILE of [..., V], the last one shorter: float64 [..., ceil(V / TILE)]."""
    starts = range(0, mass.shape[-1], TILE)
    sums = [mass[..., at : at + TILE].sum(-1, keepdim=True, dtype=torch.float64) for at in starts]
    return torch.cat(sums, dim=-1)


def _take_tile(mass: Tensor, tile: Tensor) -> Tensor:
    """Tile number tile[b] of row b, with zeros past the end of a short last one: [B, <= TILE]."""
    size = mass.shape[-1]
    if size <= TILE:
        return mass
    column = tile * TILE + torch.arange(TILE, device=mass.device)
    return mass.gather(1, column.clamp(max=size - 1)).masked_fill_(column >= size, 0)


def _hold_below(threshold: Tensor, total: Tensor) -> Tensor:
    return torch.minimum(threshold, torch.nextafter(total, torch.zeros_like(total)))
