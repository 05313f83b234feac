"""The verification rule in torch: what every other backend must equal, token for token.

Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding", ICML 2023;
Chen et al., "Accelerating large language model decoding with speculative sampling", 2023.
Inputs are checked by `driftguard_engine.verify`; nothing is checked here.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from driftguard_engine.kernels import philox, tiles
from driftguard_engine.kernels.distribution import Exp2, Laws, Shaping, laws
from driftguard_engine.kernels.exp2 import torch_exp2
from driftguard_engine.kernels.inverse_cdf import pick
from driftguard_engine.kernels.philox import RandomWords


@dataclass(frozen=True, slots=True)
class Noise:
    """Where the random numbers of B rows start: all int64 [B]."""

    seed: Tensor
    position: Tensor  # index in the sequence of the first token drawn

    def rows(self, index: Tensor) -> Noise:
        return Noise(self.seed[index], self.position[index])


@dataclass(frozen=True, slots=True)
class Chain:
    """B drafted runs to verify. Row b offers draft_lengths[b] tokens and reads one target row more."""

    target_logits: Tensor  # [B, K+1, V]
    draft_logits: Tensor  # [B, K, V]
    draft_tokens: Tensor  # [B, K] int64
    draft_lengths: Tensor  # [B] int64, 0 .. K
    shaping: Shaping
    noise: Noise

    @property
    def read(self) -> Tensor:
        """Which target rows count: bool [B, K+1]. read[:, 1:] says the same of the draft's rows."""
        step = torch.arange(self.target_logits.shape[1], device=self.target_logits.device)
        return step <= self.draft_lengths.unsqueeze(1)

    @property
    def proposed(self) -> Tensor:
        """Draft tokens within the row's length that the vocabulary has: bool [B, K]."""
        known = (self.draft_tokens >= 0) & (self.draft_tokens < self.target_logits.shape[-1])
        return known & self.read[:, 1:]

    def rows(self, index: Tensor) -> Chain:
        return Chain(
            self.target_logits[index],
            self.draft_logits[index],
            self.draft_tokens[index],
            self.draft_lengths[index],
            self.shaping.rows(index),
            self.noise.rows(index),
        )


def verify_chain(chain: Chain, exp2: Exp2 = torch_exp2) -> tuple[Tensor, Tensor]:
    """Tokens [B, K+1], int64 padded with -1, and how many drafts of each row were accepted, int64 [B]."""
    greedy = chain.shaping.greedy
    if bool(greedy.all()):
        return _verify_greedy(chain)
    if not bool(greedy.any()):
        return _verify_stochastic(chain, exp2)
    tokens = chain.draft_lengths.new_empty(chain.target_logits.shape[:2])
    accepted = torch.empty_like(chain.draft_lengths)
    index = greedy.nonzero().squeeze(1)
    tokens[index], accepted[index] = _verify_greedy(chain.rows(index))
    index = (~greedy).nonzero().squeeze(1)
    tokens[index], accepted[index] = _verify_stochastic(chain.rows(index), exp2)
    return tokens, accepted


def draft_words(noise: Noise, steps: int) -> RandomWords:
    """The draft's noise, [steps, 2, B]: in one pass, because a pass over few costs as much as over many."""
    step = torch.arange(steps).unsqueeze(1)
    return philox.words(noise.seed, noise.position.cpu() + step, philox.DRAFT).swapaxes(0, 1)


def sample_draft(logits: Tensor, shaping: Shaping, words: RandomWords, exp2: Exp2 = torch_exp2) -> Tensor:
    """One token per row of logits [B, V], int64 [B]: argmax at temperature 0, else by words [2, B]."""
    greedy = shaping.greedy
    if bool(greedy.all()):
        return logits.argmax(-1)
    if bool(greedy.any()):
        index = (~greedy).nonzero().squeeze(1)
        drawn = sample_draft(logits[index], shaping.rows(index), words[:, index.cpu().numpy()], exp2)
        return logits.argmax(-1).index_copy_(0, index, drawn)
    law = laws(logits.unsqueeze(1), shaping, exp2)
    mass = _weights(logits, law, exp2)
    return _draw(mass, _tile_masses(mass, law), words)


def _verify_greedy(chain: Chain) -> tuple[Tensor, Tensor]:
    best = chain.target_logits.argmax(-1)  # [B, K+1]; the first of equals
    accepted = _leading((chain.draft_tokens == best[:, :-1]) & chain.proposed)
    return _emit(chain.draft_tokens, accepted, best.gather(1, accepted.unsqueeze(1))), accepted


def _verify_stochastic(chain: Chain, exp2: Exp2) -> tuple[Tensor, Tensor]:
    p, q = laws(chain.target_logits, chain.shaping, exp2), laws(chain.draft_logits, chain.shaping, exp2)
    accepted = _leading(_passes(chain, p, q, exp2) & chain.proposed)

    # The step at which the target adds its own token. A rejected draft leaves (p - q)+. After the last draft
    # nothing was rejected, and an id that the vocabulary lacks was no draw from q: both leave p itself.
    row = torch.arange(len(accepted), device=accepted.device)
    p = p.at(accepted)
    mass = _weights(chain.target_logits[row, accepted], p, exp2)
    tile_mass = _tile_masses(mass, p)
    rejected = F.pad(chain.proposed, (0, 1))[row, accepted]
    if bool(rejected.any()):
        step = accepted.clamp(max=chain.draft_logits.shape[1] - 1)
        q = q.at(step)
        residual = mass * _reciprocal(p) - _weights(chain.draft_logits[row, step], q, exp2) * _reciprocal(q)
        residual.clamp_(min=0)
        residual_tiles = tiles.tile_sums(tiles.chunked(residual, 0)).double()
        # An empty residual takes p = q up to rounding, and then p is the law to draw from.
        residually = rejected.unsqueeze(1) & (residual_tiles.amax(-1, keepdim=True) > 0)
        mass, tile_mass = residual.where(residually, mass), residual_tiles.where(residually, tile_mass)
    position = chain.noise.position + accepted
    own = _draw(mass, tile_mass, philox.words(chain.noise.seed, position, philox.RESIDUAL))
    return _emit(chain.draft_tokens, accepted, own.unsqueeze(1)), accepted


def _passes(chain: Chain, p: Laws, q: Laws, exp2: Exp2) -> Tensor:
    """u q(x) < p(x), multiplied out: bool [B, K]."""
    tokens = chain.draft_tokens.where(chain.proposed, 0).unsqueeze(2)  # [B, K, 1]
    steps = tokens.shape[1]
    p_weight, q_weight = (
        law.weigh(logits[:, :steps].gather(2, tokens).float(), tokens, exp2).squeeze(2).double()
        for law, logits in ((p.first(steps), chain.target_logits), (q, chain.draft_logits))
    )
    step = torch.arange(steps, device=tokens.device)
    noise = chain.noise
    uniform = philox.uniforms(noise.seed.unsqueeze(1), noise.position.unsqueeze(1) + step, philox.ACCEPT)
    return uniform * (q_weight * p.normaliser[:, :steps]) < p_weight * q.normaliser


def _weights(logits: Tensor, law: Laws, exp2: Exp2) -> Tensor:
    """Weights of logits [B, V] under laws of one step: float32 [B, V]."""
    tokens = torch.arange(logits.shape[-1], device=logits.device)
    return law.weigh(logits.float().unsqueeze(1), tokens, exp2).squeeze(1)


def _reciprocal(law: Laws) -> Tensor:
    return (1 / law.normaliser).float()


def _tile_masses(weights: Tensor, law: Laws) -> Tensor:
    """[B, V] -> float64 [B, T]: what the normaliser was summed from, or anew where a cut took some away."""
    cut = law.cut > -torch.inf  # [B, 1]
    if not bool(cut.any()):
        return law.tile_mass.squeeze(1)
    return tiles.tile_sums(tiles.chunked(weights, 0)).double().where(cut, law.tile_mass.squeeze(1))


def _draw(mass: Tensor, tile_mass: Tensor, words: RandomWords) -> Tensor:
    """A token of [B, V] by its mass: the tile by words[1] and tile_mass [B, T], inside by words[0]."""
    tile = pick(tile_mass, words[1])
    return tile * tiles.TILE + pick(tiles.tile_of(mass, tile, 0), words[0])


def _leading(passed: Tensor) -> Tensor:
    """How many of [B, K] pass before the first that does not: int64 [B]."""
    return passed.cumprod(-1).sum(-1)


def _emit(draft_tokens: Tensor, accepted: Tensor, own: Tensor) -> Tensor:
    """Accepted drafts, then the target's own token [B, 1], then -1: int64 [B, K+1]."""
    step = torch.arange(draft_tokens.shape[1], device=draft_tokens.device)
    kept = draft_tokens.masked_fill(step >= accepted.unsqueeze(1), -1)
    return F.pad(kept, (0, 1), value=-1).scatter_(1, accepted.unsqueeze(1), own)
