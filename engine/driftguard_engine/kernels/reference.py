"""The verification rule in numpy: what every other backend must equal, token for token.

Leviathan, Kalman, Matias, "Fast inference from transformers via speculative decoding", ICML 2023;
Chen et al., "Accelerating large language model decoding with speculative sampling", 2023.
Inputs are checked by `driftguard_engine.verify`; nothing is checked here.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from driftguard_engine.kernels import philox, tiles
from driftguard_engine.kernels.distribution import Doubles, Exp2, Index, Integers, Laws, Shaping, Truths, laws
from driftguard_engine.kernels.exp2 import Singles, numpy_exp2
from driftguard_engine.kernels.inverse_cdf import pick
from driftguard_engine.kernels.philox import RandomWords


@dataclass(frozen=True, slots=True)
class Noise:
    """Where the random numbers of B rows start: all [B]."""

    seed: Integers
    position: Integers  # index in the sequence of the first token drawn

    @classmethod
    def of(cls, seed: Tensor, position: Tensor) -> Noise:
        return cls(seed.long().cpu().numpy(), position.long().cpu().numpy())

    def rows(self, index: Index) -> Noise:
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


@np.errstate(invalid="ignore")  # rows that nobody reads may hold anything
def verify_chain(chain: Chain, exp2: Exp2 = numpy_exp2) -> tuple[Tensor, Tensor]:
    """Tokens [B, K+1], int64 padded with -1, and how many drafts of each row were accepted, int64 [B]."""
    given = _Arrays.of(chain)
    greedy = given.shaping.greedy
    if greedy.all():
        tokens, accepted = _verify_greedy(given)
    elif not greedy.any():
        tokens, accepted = _verify_stochastic(given, exp2)
    else:
        tokens = np.empty(given.target.shape[:2], np.int64)
        accepted = np.empty(len(tokens), np.int64)
        tokens[greedy], accepted[greedy] = _verify_greedy(given.rows(greedy))
        tokens[~greedy], accepted[~greedy] = _verify_stochastic(given.rows(~greedy), exp2)
    device = chain.target_logits.device
    return torch.from_numpy(tokens).to(device), torch.from_numpy(accepted).to(device)


def draft_words(noise: Noise, steps: int) -> RandomWords:
    """The draft's noise, [steps, 2, B]: in one pass, because a pass over few costs as much as over many."""
    position = noise.position + np.arange(steps)[:, np.newaxis]
    return philox.words(noise.seed, position, philox.DRAFT).swapaxes(0, 1)


def sample_draft(logits: Tensor, shaping: Shaping, words: RandomWords, exp2: Exp2 = numpy_exp2) -> Tensor:
    """One token per row of logits [B, V], int64 [B]: argmax at temperature 0, else by words [2, B]."""
    rows, greedy = _singles(logits), shaping.greedy
    tokens = rows.argmax(-1) if greedy.any() else np.empty(len(rows), np.int64)
    if not greedy.all():
        drawn = slice(None) if not greedy.any() else ~greedy
        law = laws(rows[drawn, np.newaxis], shaping.rows(drawn), exp2)
        mass = _row_weights(rows[drawn], law, exp2)
        tokens[drawn] = _draw(mass, _tile_masses(mass, law), words[:, drawn])
    return torch.from_numpy(tokens).to(logits.device)


@dataclass(frozen=True, slots=True)
class _Arrays:
    """A `Chain` in numpy, with what follows from it."""

    target: Singles
    draft: Singles
    tokens: Integers
    proposed: Truths
    shaping: Shaping
    noise: Noise

    @classmethod
    def of(cls, chain: Chain) -> _Arrays:
        target, draft = _singles(chain.target_logits), _singles(chain.draft_logits)
        tokens, proposed = chain.draft_tokens.cpu().numpy(), chain.proposed.cpu().numpy()
        return cls(target, draft, tokens, proposed, chain.shaping, chain.noise)

    def rows(self, index: Index) -> _Arrays:
        return _Arrays(
            self.target[index],
            self.draft[index],
            self.tokens[index],
            self.proposed[index],
            self.shaping.rows(index),
            self.noise.rows(index),
        )


def _singles(logits: Tensor) -> Singles:
    return logits.float().cpu().numpy()


def _verify_greedy(given: _Arrays) -> tuple[Integers, Integers]:
    best = given.target.argmax(-1)  # [B, K+1]; the first of equals
    accepted = _leading((given.tokens == best[:, :-1]) & given.proposed)
    return _emit(given.tokens, accepted, np.take_along_axis(best, accepted[:, np.newaxis], 1)), accepted


def _verify_stochastic(given: _Arrays, exp2: Exp2) -> tuple[Integers, Integers]:
    p, q = laws(given.target, given.shaping, exp2), laws(given.draft, given.shaping, exp2)
    steps = np.arange(given.target.shape[1])
    noise = philox.words(
        given.noise.seed[:, np.newaxis],
        given.noise.position[:, np.newaxis] + steps,
        [[[philox.ACCEPT]], [[philox.RESIDUAL]]],
    )  # [2, 2, B, K+1]: words, of both purposes
    accepted = _leading(_passes(given, p, q, philox.uniforms_of(noise[0, 0, :, :-1]), exp2) & given.proposed)

    row = np.arange(len(accepted))
    mass, tile_mass = _own_masses(given, p.at(accepted), q, accepted, exp2)
    own = _draw(mass, tile_mass, noise[:, 1, row, accepted])
    return _emit(given.tokens, accepted, own[:, np.newaxis]), accepted


def _passes(given: _Arrays, p: Laws, q: Laws, uniform: Doubles, exp2: Exp2) -> Truths:
    """u q(x) < p(x), multiplied out: [B, K]."""
    tokens = np.where(given.proposed, given.tokens, 0)[..., np.newaxis]  # [B, K, 1]
    steps = tokens.shape[1]
    p_weight, q_weight = (
        law.weigh(np.take_along_axis(logits[:, :steps], tokens, 2), tokens, exp2)[..., 0].astype(np.float64)
        for law, logits in ((p.first(steps), given.target), (q, given.draft))
    )
    return uniform * (q_weight * p.normaliser[:, :steps]) < p_weight * q.normaliser


def _own_masses(given: _Arrays, p: Laws, q: Laws, accepted: Integers, exp2: Exp2) -> tuple[Singles, Doubles]:
    """What the target's own token is drawn by, [B, V], and the masses of its tiles, [B, T].

    A rejected draft leaves (p - q)+. After the last draft nothing was rejected, and an id that the vocabulary
    lacks was no draw from q: both leave p itself. p: the laws of the steps at which rows stopped.
    """
    row = np.arange(len(accepted))
    mass = _row_weights(given.target[row, accepted], p, exp2)
    tile_mass = _tile_masses(mass, p)
    step = np.minimum(accepted, given.proposed.shape[1] - 1)
    if not given.proposed.size or not (rejected := given.proposed[row, step] & (step == accepted)).any():
        return mass, tile_mass
    q = q.at(step)
    residual = mass * _reciprocal(p)
    residual -= _row_weights(given.draft[row, step], q, exp2) * _reciprocal(q)
    np.maximum(residual, 0, out=residual)
    residual_tiles = tiles.tile_sums(tiles.chunked(residual, 0)).astype(np.float64)
    # An empty residual takes p = q up to rounding, and then p is the law to draw from.
    residually = (rejected & (residual_tiles.max(-1) > 0))[:, np.newaxis]
    return np.where(residually, residual, mass), np.where(residually, residual_tiles, tile_mass)


def _row_weights(logits: Singles, law: Laws, exp2: Exp2) -> Singles:
    """Weights of logits [B, V] under laws of one step: [B, V]."""
    return law.weigh(logits[:, np.newaxis], np.arange(logits.shape[-1]), exp2)[:, 0]


def _reciprocal(law: Laws) -> Singles:
    return (1 / law.normaliser).astype(np.float32)


def _tile_masses(weights: Singles, law: Laws) -> Doubles:
    """[B, V] -> [B, T]: what the normaliser was summed from, or anew where a cut took some away."""
    is_cut = law.cut > -np.inf  # [B, 1]
    if not is_cut.any():
        return law.tile_mass[:, 0]
    return np.where(is_cut, tiles.tile_sums(tiles.chunked(weights, 0)), law.tile_mass[:, 0])


def _draw(mass: Singles, tile_mass: Doubles, words: RandomWords) -> Integers:
    """A token of [B, V] by its mass: the tile by words[1] and tile_mass [B, T], inside by words[0]."""
    size = mass.shape[-1]
    if size <= tiles.TILE:
        return pick(mass, words[0])
    tile = pick(tile_mass, words[1])
    column = tile[:, np.newaxis] * tiles.TILE + np.arange(tiles.TILE)
    inside = np.take_along_axis(mass, np.minimum(column, size - 1), 1)
    inside[column >= size] = 0
    return tile * tiles.TILE + pick(inside, words[0])


def _leading(passed: Truths) -> Integers:
    """How many of [B, K] pass before the first that does not: [B]."""
    count: Integers = np.logical_and.accumulate(passed, axis=-1).sum(-1)
    return count


def _emit(draft_tokens: Integers, accepted: Integers, own: Integers) -> Integers:
    """Accepted drafts, then the target's own token [B, 1], then -1: [B, K+1]."""
    rows, drafts = draft_tokens.shape
    tokens = np.full((rows, drafts + 1), -1, np.int64)
    np.copyto(tokens[:, :-1], draft_tokens, where=np.arange(drafts) < accepted[:, np.newaxis])
    np.put_along_axis(tokens, accepted[:, np.newaxis], own, 1)
    return tokens
