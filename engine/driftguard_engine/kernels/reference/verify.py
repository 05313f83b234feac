"""The verification rules in numpy: every other backend must give the same tokens.

token: each draft token is accepted or rejected by itself (Leviathan, Kalman, Matias, "Fast inference from
transformers via speculative decoding", ICML 2023; Chen et al., "Accelerating large language model decoding
with speculative sampling", 2023).
block: the accepted run is chosen with a view to the whole block (Sun et al., "Block verification accelerates
speculative decoding", ICLR 2025, Algorithm 2).
What both leave for the target's own token, (r p - q)+, is seldom added up: tokens are drawn from p, and one
stays with probability (r p - q)+ / r p (`propose`).
Inputs are checked by `driftguard_engine.verify`; nothing is checked here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from driftguard_engine.kernels.reference import philox, tiles
from driftguard_engine.kernels.reference.distribution import (
    Exp2,
    TokenDistributions,
    token_distributions,
    uncut_tile_mass,
)
from driftguard_engine.kernels.reference.exp2 import Singles, numpy_exp2
from driftguard_engine.kernels.reference.inverse_cdf import pick
from driftguard_engine.kernels.reference.philox import RandomWords
from driftguard_engine.kernels.reference.sampling import (
    EVERY,
    Doubles,
    Index,
    Integers,
    SamplingBatch,
    Truths,
)

Rule = Literal["token", "block"]

_PURPOSES = np.array([philox.DRAFT, philox.ACCEPT, philox.RESIDUAL])

PROPOSALS = 32  # for a row, at most, before its masses are added up; a multiple of the kernels' warps


class StepNoise:
    """The random numbers of B rows at S steps, for every purpose.

    All are drawn in one pass, because a pass over few costs as much as one over many; and only when the first
    is needed, because greedy rows need none.
    """

    def __init__(self, seed: Integers, position: Integers, steps: int, rule: Rule = "token") -> None:
        """position [B]: index in the sequence of the first token drawn."""
        self.batch = len(seed)
        self._seed, self._position, self._steps = seed, position, steps
        # The block rule's outcome depends on the noise of every position that it looks at. What is drafted
        # behind the accepted run again must not be drawn from it, so that each of its steps has its own.
        self._step = position if rule == "block" else np.zeros_like(position)

    @cached_property
    def _drawn(self) -> tuple[RandomWords, Doubles]:
        """Words [2, 3, B, S], and the uniforms of the first ones for acceptance [B, S]."""
        seed, position = self._seed[:, np.newaxis], self._position[:, np.newaxis]
        purposes = _PURPOSES[:, np.newaxis, np.newaxis] | self._step[:, np.newaxis] << 32
        words = philox.words(seed, position + np.arange(self._steps), purposes)
        return words, philox.uniforms_of(words[0, 1])

    @property
    def accept(self) -> Doubles:
        """[B, S]"""
        return self._drawn[1]

    def draft(self, step: int, rows: Index = EVERY) -> Noise:
        """Of the draft tokens of these rows at this step."""
        return Noise(self._drawn[0][:, 0, rows, step], self, philox.DRAFT, step, rows)

    def residual(self, step: Integers, rows: Index = EVERY) -> Noise:
        """Of the target's own tokens of these rows, each at its step [N]."""
        words = self._drawn[0][:, 2, rows][:, np.arange(len(step)), step]
        return Noise(words, self, philox.RESIDUAL, step, rows)

    def more(self, rows: Index, step: Integers | int, purposes: Integers) -> RandomWords:
        """Of these rows at their steps, for each of P purposes: [2, P, N]."""
        both = purposes[:, np.newaxis] | self._step[rows] << 32
        return philox.words(self._seed[rows], self._position[rows] + step, both)


@dataclass(frozen=True, slots=True)
class Noise:
    """The random numbers of one token of N rows."""

    words: RandomWords  # [2, N]: by which the token is drawn
    steps: StepNoise
    purpose: int
    step: Integers | int  # [N], or of all
    rows: Index  # of the batch: N

    def of(self, index: Index) -> Noise:
        """Of these of the N rows."""
        step = self.step if isinstance(self.step, int) else self.step[index]
        rows = np.arange(self.steps.batch)[self.rows][index]
        return Noise(self.words[:, index], self.steps, self.purpose, step, rows)

    def proposal(self, number: int) -> tuple[RandomWords, Doubles]:
        """By which a token, its lane and its tile are drawn, [3, N]; and by which the token stays, [N]."""
        purposes = self.purpose + number * philox.PROPOSED + np.array([0, philox.MORE])
        (inside, stays), (tile, lane) = self.steps.more(self.rows, self.step, purposes)
        return np.stack((inside, lane, tile)), philox.uniforms_of(stays)


@dataclass(frozen=True, slots=True)
class Chain:
    """B drafted runs to verify. Row b offers draft_lengths[b] tokens and reads one target row more."""

    target_logits: Tensor  # [B, K+1, V]
    draft_logits: Tensor  # [B, K, V]
    draft_tokens: Tensor  # [B, K] int64
    draft_lengths: Tensor  # [B] int64, 0 .. K
    sampling: SamplingBatch
    position: Integers  # [B]: index in the sequence of the first token emitted

    @property
    def read(self) -> Tensor:
        """Which target rows are read: bool [B, K+1]. read[:, 1:] are those of the draft."""
        step = torch.arange(self.target_logits.shape[1], device=self.target_logits.device)
        return step <= self.draft_lengths.unsqueeze(1)


@dataclass(frozen=True, slots=True)
class Arrays:
    """A `Chain` in numpy."""

    target: Singles
    draft: Singles
    draft_distributions: TokenDistributions  # [B, K]; arbitrary in greedy rows, and for drafts not proposed
    tokens: Integers
    lengths: Integers
    proposed: Truths  # [B, K]: draft tokens within the row's length that the vocabulary has
    sampling: SamplingBatch

    @classmethod
    def of(cls, chain: Chain, exp2: Exp2 = numpy_exp2) -> Arrays:
        target, draft, sampling = singles(chain.target_logits), singles(chain.draft_logits), chain.sampling
        found = draft_distributions(draft, sampling, exp2)
        tokens, lengths = chain.draft_tokens.cpu().numpy(), chain.draft_lengths.cpu().numpy()
        known = tokens.view(np.uint64) < target.shape[-1]  # read as unsigned, an id below 0 is too large
        proposed = (np.arange(tokens.shape[1]) < lengths[:, np.newaxis]) & known
        return cls(target, draft, found, tokens, lengths, proposed, sampling)

    def rows(self, index: Index) -> Arrays:
        return Arrays(
            self.target[index],
            self.draft[index],
            self.draft_distributions.rows(index),
            self.tokens[index],
            self.lengths[index],
            self.proposed[index],
            self.sampling.rows(index),
        )


def singles(logits: Tensor) -> Singles:
    return logits.to("cpu", torch.float32).numpy()


def verify_chain(chain: Chain, exp2: Exp2 = numpy_exp2, rule: Rule = "token") -> tuple[Tensor, Tensor]:
    """Tokens [B, K+1], int64 padded with -1, and how many drafts of each row were accepted, int64 [B]."""
    device = chain.target_logits.device
    noise = StepNoise(chain.sampling.seed, chain.position, chain.target_logits.shape[1], rule)
    given = Arrays.of(chain, exp2)
    accepted, own, _ = verify(given, noise, exp2, rule)
    tokens = emitted(given.tokens, accepted, own)
    return torch.from_numpy(tokens).to(device), torch.from_numpy(accepted).to(device)


@np.errstate(invalid="ignore", divide="ignore")  # rows that are not read may hold any values
def verify(
    given: Arrays, noise: StepNoise, exp2: Exp2 = numpy_exp2, rule: Rule = "token"
) -> tuple[Integers, Integers, bool]:
    """How many drafts of each row are accepted, and the target's own token behind them: both [B]; and whether
    every row of logits has a distribution, also those that are not read. Greedy rows have one rule.

    The result of a row of logits without a distribution is meaningless, but affects no other request.
    """
    if given.sampling.all_greedy:
        return _verify_greedy(given)
    if not given.sampling.any_greedy:
        return _verify_stochastic(given, noise, EVERY, exp2, rule)
    greedy = given.sampling.greedy
    accepted, own = np.empty((2, len(greedy)), np.int64)
    accepted[greedy], own[greedy], valid = _verify_greedy(given.rows(greedy))
    others = _verify_stochastic(given.rows(~greedy), noise, ~greedy, exp2, rule)
    accepted[~greedy], own[~greedy], others_valid = others
    return accepted, own, valid and others_valid


@np.errstate(invalid="ignore", divide="ignore")
def draft_distributions(
    logits: Singles, sampling: SamplingBatch, exp2: Exp2 = numpy_exp2
) -> TokenDistributions:
    """Distributions of the draft's logits [B, S, V]. Greedy rows need none and get a point mass."""
    if not sampling.any_greedy:
        return token_distributions(logits, sampling, exp2)
    found, drawn = TokenDistributions.certain(sampling, *logits.shape[1:]), ~sampling.greedy
    if not sampling.all_greedy:
        found.put(drawn, slice(None), token_distributions(logits[drawn], sampling.rows(drawn), exp2))
    return found


def draw_drafts(
    logits: Singles,
    distributions: TokenDistributions,
    sampling: SamplingBatch,
    noise: Noise,
    exp2: Exp2 = numpy_exp2,
) -> Integers:
    """One token per row of logits [B, V] and their distributions, S = 1; argmax of greedy rows."""
    if sampling.any_greedy:
        tokens: Integers = logits.argmax(-1)
        if not sampling.all_greedy:
            drawn = ~sampling.greedy
            others = logits[drawn], distributions.rows(drawn), sampling.rows(drawn), noise.of(drawn)
            tokens[drawn] = draw_drafts(*others, exp2)
        return tokens
    mass = distributions.weigh(logits[:, np.newaxis], np.arange(logits.shape[-1]), exp2)[:, 0]
    changed = distributions.cut[:, 0] > -np.inf
    return _draw(Masses(logits, distributions, mass, changed), noise, exp2)


def draw_chain(
    logits: Tensor, sampling: SamplingBatch, position: Integers, rule: Rule, exp2: Exp2 = numpy_exp2
) -> Tensor:
    """The draft tokens of one step from logits [B, K, V] that depend on none of them: int64 [B, K].

    position [B]: of the first.
    """
    rows = singles(logits)
    distributions = draft_distributions(rows, sampling, exp2)
    noise = StepNoise(sampling.seed, position, rows.shape[1] + 1, rule)
    tokens = np.empty(rows.shape[:2], np.int64)
    for step in range(rows.shape[1]):
        of_step = distributions.rows(EVERY, slice(step, step + 1))
        tokens[:, step] = draw_drafts(rows[:, step], of_step, sampling, noise.draft(step), exp2)
    return torch.from_numpy(tokens)


def sample_draft(
    logits: Tensor, sampling: SamplingBatch, position: Integers, exp2: Exp2 = numpy_exp2
) -> Tensor:
    """One token per row of logits [B, V], int64 [B]. position [B]: its index in the sequence."""
    rows = singles(logits)
    distributions = draft_distributions(rows[:, np.newaxis], sampling, exp2)
    noise = StepNoise(sampling.seed, position, 1).draft(0)
    return torch.from_numpy(draw_drafts(rows, distributions, sampling, noise, exp2)).to(logits.device)


def _verify_greedy(given: Arrays) -> tuple[Integers, Integers, bool]:
    best = given.target.argmax(-1)  # [B, K+1]; the first of equals
    accepted = _leading((given.tokens == best[:, :-1]) & given.proposed)
    own = best[np.arange(len(accepted)), accepted]
    return accepted, own, _all_finite(given.target.max(-1))


def _verify_stochastic(
    given: Arrays, noise: StepNoise, rows: Index, exp2: Exp2, rule: Rule
) -> tuple[Integers, Integers, bool]:
    """rows: of the noise, those given."""
    # Both models' distributions side by side, because few calls over all cost less than many: [B, K + K+1].
    distributions = given.draft_distributions.beside(token_distributions(given.target, given.sampling, exp2))
    accept = noise.accept[rows, : given.tokens.shape[1]]
    if rule == "block":
        accepted, ratio = _accept_block(given, distributions, accept, exp2)
    else:
        p, q = _offered(given, distributions, exp2)
        accepted = _leading((accept * q < p) & given.proposed)
        ratio = np.ones(len(accepted))
    own = _draw(
        _own_masses(given, distributions, accepted, ratio, exp2), noise.residual(accepted, rows), exp2
    )
    return accepted, own, _all_finite(distributions.peak)


def _all_finite(peaks: Singles) -> bool:
    return math.isfinite(peaks.sum(dtype=np.float64))  # finite float32 numbers cannot overflow it


def _offered(given: Arrays, distributions: TokenDistributions, exp2: Exp2) -> tuple[Doubles, Doubles]:
    """Target's p and draft's q of the draft tokens, both [B, K], times one number for both."""
    rows, drafts = given.tokens.shape
    tokens = np.where(given.proposed, given.tokens, 0)
    at = np.arange(rows)[:, np.newaxis], np.arange(drafts), tokens
    offered = np.stack((given.draft[at], given.target[at]), axis=1)  # [B, 2, K]
    both, of_both = offered.reshape(rows, -1, 1), np.concatenate((tokens, tokens), axis=1)
    distributions = distributions.rows(EVERY, slice(2 * drafts))
    weight = distributions.weigh(both, of_both[..., np.newaxis], exp2)[..., 0].astype(np.float64)
    q, p, normaliser = slice(drafts), slice(drafts, None), distributions.normaliser
    return weight[:, p] * normaliser[:, q], weight[:, q] * normaliser[:, p]


def _accept_block(
    given: Arrays, distributions: TokenDistributions, uniform: Doubles, exp2: Exp2
) -> tuple[Integers, Doubles]:
    """How many drafts of each row are accepted by the block rule, n, and the ratio behind them: both [B].

    The ratio behind i drafts is r_i = min(r_(i-1) p(x_i) / q(x_i), 1), r_0 = 1. With e_i the sum of
    (r_i p - q)+ over the token behind them (of r_i p behind the last draft, where nothing is drafted),
    n is the largest i with u_i < e_i / (e_i + 1 - r_i).
    """
    p, q = _offered(given, distributions, exp2)
    rows, drafts = q.shape
    lengths = _leading(given.proposed)
    ratios = np.ones((rows, drafts + 1))
    for step in range(drafts):
        # In float64 a ratio is taken for 0 only below 2**-1022: the target draws no such run.
        above, below = ratios[:, step] * p[:, step], q[:, step]
        ratios[:, step + 1] = np.where(above < below, above / below, above > 0)
    accepted = np.zeros(rows, np.int64)
    for count in range(drafts, 0, -1):
        asked = ((accepted == 0) & (count <= lengths)).nonzero()[0]
        ratio = ratios[asked, count]
        excess, followed = ratio.copy(), count < lengths[asked]
        if followed.any():
            row = asked[followed]
            stopped = np.tile((drafts + count, count), (len(row), 1))
            logits = np.stack((given.target[row, count], given.draft[row, count]), axis=1)
            there = distributions.rows(row).at(stopped)
            weights = there.weigh(logits, np.arange(logits.shape[-1]), exp2)
            masses = _excess(weights, _shares(there.normaliser, ratio[followed]))
            of_tiles = tiles.tile_sums(tiles.chunked(masses, 0))
            excess[followed] = tiles.row_sum(of_tiles.astype(np.float64))
        passed = uniform[asked, count - 1] * (excess + (1 - ratio)) < excess
        accepted[asked[passed]] = count
    return accepted, ratios[np.arange(rows), accepted]


def _shares(normaliser: Doubles, ratio: Doubles) -> Singles:
    """What a weight of the target and one of the draft are multiplied by, [N, 2]. ratio [N]: r."""
    share = 1 / normaliser
    share[:, 0] *= ratio
    rounded: Singles = share.astype(np.float32)
    return rounded


def _excess(weights: Singles, shares: Singles) -> Singles:
    """(r p - q)+ [N, V] of the weights [N, 2, V] of target and draft."""
    excess = weights[:, 0] * shares[:, :1]
    excess -= weights[:, 1] * shares[:, 1:]
    positive: Singles = np.maximum(excess, 0, out=excess)
    return positive


@dataclass(frozen=True, slots=True)
class Masses:
    """What a token of each of B rows is drawn by."""

    logits: Singles  # [B, V]
    distributions: TokenDistributions  # [B, S]; the first is that of the logits
    mass: Singles  # [B, V]
    changed: Truths  # [B]: whether the mass is not the uncut weight
    # Where a draft was rejected, [B], whether it left a residual, [B], and of which shares, [B, 2].
    residuals: tuple[Truths, Truths, Singles] | None = None

    def rows(self, index: Index) -> Masses:
        """Without what is known of residuals."""
        distributions = self.distributions.rows(index)
        return Masses(self.logits[index], distributions, self.mass[index], self.changed[index])

    def uncut_tile_mass(self, exp2: Exp2) -> Doubles:
        """[B, T]"""
        tile_mass, cut = self.distributions.tile_mass[:, 0], self.distributions.cut[:, 0] > -np.inf
        if cut.any():  # then it may not be that
            tile_mass = tile_mass.copy()
            tile_mass[cut] = uncut_tile_mass(self.logits[cut], self.distributions.scale[cut], exp2)
        return tile_mass

    def proposable(self) -> tuple[Truths, Singles]:
        """Of which rows tokens are proposed, and which share of the uncut weight no mass exceeds: both [B].

        For an empty residual none is."""
        if self.residuals is None:
            return self.changed, np.ones(len(self.mass), np.float32)
        rejected, residual, shares = self.residuals
        share: Singles = np.where(residual, shares[:, 0], np.float32(1))
        return np.where(rejected, residual, self.changed), share


def _own_masses(
    given: Arrays, distributions: TokenDistributions, accepted: Integers, ratio: Doubles, exp2: Exp2
) -> Masses:
    """The masses from which the target's own token is drawn. ratio [B]: r.

    A rejected draft leaves (r p - q)+. After the last draft nothing was rejected, and an id that the
    vocabulary lacks was no draw from q: both leave p itself.
    """
    row, drafts = np.arange(len(accepted)), given.tokens.shape[1]
    stopped, rejected = (drafts + accepted)[:, np.newaxis], np.zeros(len(row), np.bool_)
    own = given.target[row, accepted]
    logits, residuals = own[:, np.newaxis], None
    if drafts:
        step = np.minimum(accepted, drafts - 1)
        rejected = given.proposed[row, step] & (step == accepted)
    if rejected.any():
        stopped = np.stack((drafts + accepted, step), axis=1)  # the target's distribution, the draft's
        logits = np.stack((own, given.draft[row, step]), axis=1)
    distributions = distributions.at(stopped)
    weights = distributions.weigh(logits, np.arange(logits.shape[-1]), exp2)
    mass, changed = weights[:, 0], distributions.cut[:, 0] > -np.inf
    if rejected.any():
        shares = _shares(distributions.normaliser, ratio)
        residual = _excess(weights, shares)
        # An empty residual takes p = q up to rounding, and then p is the distribution to draw from.
        residually = rejected & residual.any(-1)
        mass, changed = np.where(residually[:, np.newaxis], residual, mass), changed | residually
        residuals = rejected, residually, shares
    return Masses(own, distributions, mass, changed, residuals)


def _draw(masses: Masses, noise: Noise, exp2: Exp2) -> Integers:
    """A token of each row by its mass."""
    if masses.mass.shape[-1] <= tiles.TILE or not masses.changed.any():
        return _draw_by_sums(masses, noise)
    tokens, (proposes, share) = np.full(len(masses.mass), -1, np.int64), masses.proposable()
    tile_mass = masses.uncut_tile_mass(exp2)
    for number in range(1, PROPOSALS + 1):
        rows = (proposes & (tokens < 0)).nonzero()[0]
        if not len(rows):
            break
        of_rows = masses.rows(rows), tile_mass[rows], share[rows], noise.of(rows)
        tokens[rows] = propose(*of_rows, number, exp2)
    rest = tokens < 0
    if rest.any():
        tokens[rest] = _draw_by_sums(masses.rows(rest), noise.of(rest))
    return tokens


def _draw_by_sums(masses: Masses, noise: Noise) -> Integers:
    return draw_token(masses.mass, masses.distributions.tile_mass[:, 0], masses.changed, noise.words)


def propose(
    masses: Masses, tile_mass: Doubles, share: Singles, noise: Noise, number: int, exp2: Exp2
) -> Integers:
    """A token of each row by the uncut weights, or -1: it stays with the probability of its mass relative to
    its weight. So a token that stays has the distribution of the masses (rejection sampling: von Neumann,
    "Various techniques used in connection with random digits", 1951), and of a row a few tokens are read.

    A tile is drawn, in it the 64 tokens that one lane of a warp weighs, and one of those. tile_mass [B, T]:
    of uncut weights. share [B]: of the weight, which the mass does not exceed. number: from 1 on.
    """
    (inside, of_tile, tile), uniform = noise.proposal(number)
    rows, size, distributions = np.arange(len(tile)), masses.mass.shape[-1], masses.distributions
    chosen = pick(tile_mass, tile)
    column = chosen[:, np.newaxis] * tiles.TILE + np.arange(tiles.TILE)
    logits = np.take_along_axis(masses.logits, np.minimum(column, size - 1), 1)
    logits[column >= size] = -np.inf

    def weigh(peak: Singles) -> Singles:
        return exp2(logits - peak[:, np.newaxis], distributions.scale[:, np.newaxis])

    sums = weigh(logits.max(-1))
    sums[column >= size + -size % tiles.RUN] = 0
    lane = pick(tiles.lane_sums(sums.reshape(len(tile), -1, tiles.CHUNK)), of_tile)
    weights = weigh(distributions.peak[:, 0]) * (logits > -np.inf)
    of_lane = weights.reshape(len(tile), -1, tiles.LANES, tiles.RUN)[rows, :, lane].reshape(len(tile), -1)
    within = pick(of_lane, inside)
    chunk, place = np.divmod(within, tiles.RUN)
    token = chosen * tiles.TILE + chunk * tiles.CHUNK + lane * tiles.RUN + place
    token = np.minimum(token, size - 1)  # of a row without a distribution
    stays = uniform * (of_lane[rows, within] * share) < masses.mass[rows, token]
    return np.where(stays, token, -1)


def draw_token(mass: Singles, tile_mass: Doubles, changed: Truths, words: RandomWords) -> Integers:
    """A token of [B, V] by its mass: the tile by words[1], inside by words[0].

    tile_mass [B, T]: what the tiles hold, but in rows that have `changed` [B] since these were summed.
    """
    size = mass.shape[-1]
    if size <= tiles.TILE:
        return pick(mass, words[0])
    if changed.any():
        tile_mass = np.where(changed[:, np.newaxis], tiles.tile_sums(tiles.chunked(mass, 0)), tile_mass)
    tile = pick(tile_mass, words[1])
    column = tile[:, np.newaxis] * tiles.TILE + np.arange(tiles.TILE)
    inside = np.take_along_axis(mass, np.minimum(column, size - 1), 1)
    inside[column >= size] = 0
    return tile * tiles.TILE + pick(inside, words[0])


def _leading(passed: Truths) -> Integers:
    """How many of [B, K] pass before the first one that does not: [B]."""
    count: Integers = np.logical_and.accumulate(passed, axis=-1).sum(-1)
    return count


def emitted(draft_tokens: Integers, accepted: Integers, own: Integers) -> Integers:
    """Accepted drafts, then the target's own token [B], then -1: [B, K+1]."""
    rows, drafts = draft_tokens.shape
    tokens = np.full((rows, drafts + 1), -1, np.int64)
    np.copyto(tokens[:, :-1], draft_tokens, where=np.arange(drafts) < accepted[:, np.newaxis])
    tokens[np.arange(rows), accepted] = own
    return tokens
