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

from driftguard_engine.kernels import philox
from driftguard_engine.kernels.distribution import Shaping, distribution, inverse_cdf, weights


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


def verify_chain(chain: Chain) -> tuple[Tensor, Tensor]:
    """Tokens [B, K+1], int64 padded with -1, and how many drafts of each row were accepted, int64 [B]."""
    greedy = chain.shaping.greedy
    if bool(greedy.all()):
        return _verify_greedy(chain)
    if not bool(greedy.any()):
        return _verify_stochastic(chain)
    tokens = chain.draft_lengths.new_empty(chain.target_logits.shape[:2])
    accepted = torch.empty_like(chain.draft_lengths)
    for verify, chosen in ((_verify_greedy, greedy), (_verify_stochastic, ~greedy)):
        index = chosen.nonzero().squeeze(1)
        tokens[index], accepted[index] = verify(chain.rows(index))
    return tokens, accepted


def draft_uniforms(noise: Noise, steps: int) -> Tensor:
    """The draft's noise of `steps` steps, float64 [B, steps]: in one pass, because a pass costs the same."""
    step = torch.arange(steps, device=noise.position.device)
    return philox.uniforms(noise.seed.unsqueeze(1), noise.position.unsqueeze(1) + step, philox.DRAFT)


def sample_draft(logits: Tensor, shaping: Shaping, uniform: Tensor) -> Tensor:
    """One token per row of logits [B, V], int64 [B]: argmax at temperature 0, else by uniform [B]."""
    greedy = shaping.greedy
    if bool(greedy.all()):
        return logits.argmax(-1)
    if bool(greedy.any()):
        index = (~greedy).nonzero().squeeze(1)
        drawn = sample_draft(logits[index], shaping.rows(index), uniform[index])
        return logits.argmax(-1).index_copy_(0, index, drawn)
    return inverse_cdf(weights(logits.unsqueeze(1), shaping).squeeze(1), uniform)


def _verify_greedy(chain: Chain) -> tuple[Tensor, Tensor]:
    best = chain.target_logits.argmax(-1)  # [B, K+1]; the first of equals
    accepted = _leading((chain.draft_tokens == best[:, :-1]) & chain.proposed)
    return _emit(chain.draft_tokens, accepted, best.gather(1, accepted.unsqueeze(1))), accepted


def _verify_stochastic(chain: Chain) -> tuple[Tensor, Tensor]:
    p = distribution(chain.target_logits, chain.shaping)
    q = distribution(chain.draft_logits, chain.shaping)
    accept_noise, residual_noise = _uniforms(chain)
    proposed = chain.proposed
    tokens = chain.draft_tokens.where(proposed, 0)
    passed = accept_noise[:, :-1] * q.of_tokens(tokens) < p.of_tokens(tokens)
    accepted = _leading(passed & proposed)

    last = accepted.unsqueeze(1)  # [B, 1]: the step at which the target adds its own token
    mass = p.at_step(accepted)  # [B, V]
    if proposed.shape[1]:
        # A rejected draft leaves (p - q)+. After the last draft nothing was rejected, and an id that the
        # vocabulary does not have was no draw from q: both leave p itself.
        rejected = F.pad(proposed, (0, 1)).gather(1, last)
        residual = (mass - q.at_step(accepted.clamp(max=proposed.shape[1] - 1))).clamp_(min=0)
        # An empty residual takes p = q up to rounding, and then p is the law to draw from.
        mass = residual.where(rejected & (residual.amax(-1, keepdim=True) > 0), mass)
    own = inverse_cdf(mass, residual_noise.gather(1, last).squeeze(1))
    return _emit(chain.draft_tokens, accepted, own.unsqueeze(1)), accepted


def _uniforms(chain: Chain) -> Tensor:
    """Accept and residual noise of each step, [2, B, K+1], in one pass like `draft_uniforms`."""
    step = torch.arange(chain.target_logits.shape[1], device=chain.target_logits.device)
    purpose = [[[philox.ACCEPT]], [[philox.RESIDUAL]]]
    return philox.uniforms(chain.noise.seed.unsqueeze(1), chain.noise.position.unsqueeze(1) + step, purpose)


def _leading(passed: Tensor) -> Tensor:
    """How many of [B, K] pass before the first that does not: int64 [B]."""
    return passed.cumprod(-1).sum(-1)


def _emit(draft_tokens: Tensor, accepted: Tensor, own: Tensor) -> Tensor:
    """Accepted drafts, then the target's own token [B, 1], then -1: int64 [B, K+1]."""
    step = torch.arange(draft_tokens.shape[1], device=draft_tokens.device)
    kept = draft_tokens.masked_fill(step >= accepted.unsqueeze(1), -1)
    return F.pad(kept, (0, 1), value=-1).scatter_(1, accepted.unsqueeze(1), own)
