"""A second, simple verifier that can be set to make one known mistake of speculative engines.

Without a mistake it is an independent implementation of the same rule on the same random numbers, so it
must emit exactly the engine's tokens. With one, the checkers of `distributions` must notice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from driftguard_engine.kernels.reference import philox
from driftguard_engine.verify import VerifyResult
from numpy.typing import NDArray
from torch import Tensor

Mistake = Literal[
    "none",
    "accept shares the draft's noise",
    "residual shares the draft's noise",
    "residual shares the draft's gumbel noise",
    "residual from p",
    "q before top-k, p after",
    "acceptance x 1.02",
    "draft law dropped",
]


BlockMistake = Literal[
    "none",
    "residual without the ratio",
    "one uniform for every run",
    "ratio not capped at 1",
    "the shortest run that passes",
]


def _uniforms(seed: Tensor, position: Tensor, purpose: int | Tensor) -> NDArray[np.float64]:
    """Numbers in [0, 1), as the engine makes them of its random words."""
    return philox.uniforms_of(philox.words(seed, position, purpose)[0])


def softmax(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """[B, V] -> float64 [B, V], by a stable sort of everything."""
    p = (logits.double() / temperature.double().unsqueeze(1)).softmax(-1)
    order = logits.sort(dim=-1, descending=True, stable=True).indices
    ranked = p.gather(1, order)
    top_k = top_k.where(top_k > 0, logits.shape[-1])
    ranked = ranked * (torch.arange(logits.shape[-1]) < top_k.unsqueeze(1))
    before = ranked.cumsum(-1) - ranked
    outside = (before >= top_p.double().unsqueeze(1) * ranked.sum(-1, keepdim=True)) & (top_p < 1).unsqueeze(
        1
    )
    outside[:, 0] = False
    ranked = ranked.masked_fill(outside, 0)
    return torch.zeros_like(p).scatter_(1, order, ranked / ranked.sum(-1, keepdim=True))


def pick(distribution: Tensor, uniform: Tensor) -> Tensor:
    cumulative = distribution.cumsum(-1)
    return (
        (cumulative <= uniform.unsqueeze(1) * cumulative[:, -1:])
        .sum(-1)
        .clamp(max=distribution.shape[-1] - 1)
    )


def gumbel_pick(distribution: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    cell = position.unsqueeze(1) * distribution.shape[-1] + torch.arange(distribution.shape[-1])
    uniform = torch.from_numpy(_uniforms(seed.unsqueeze(1), cell, philox.DRAFT))
    return (distribution.log() - (-uniform.log()).log()).argmax(-1)


def gumbel_sampler(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    seed: Tensor,
    position: Tensor,
    step: int,
) -> Tensor:
    """Sound on its own: exactly q, by the Gumbel maximum."""
    return gumbel_pick(softmax(logits, temperature, top_k, top_p), seed, position + step)


def argmax_sampler(logits: Tensor, *_: Tensor) -> Tensor:
    """The mistake of drafting greedily while the verifier assumes that drafts were sampled from q."""
    return logits.argmax(-1)


@dataclass(frozen=True)
class PlainVerifier:
    """Called as `verify_chain`; temperatures must be positive, token ids valid."""

    mistake: Mistake = "none"

    def __call__(
        self,
        target_logits: Tensor,
        draft_logits: Tensor,
        draft_tokens: Tensor,
        draft_lengths: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seed: Tensor,
        position: Tensor,
    ) -> VerifyResult:
        rows, steps, _ = target_logits.shape
        tokens = torch.full((rows, steps), -1)
        accepted = torch.zeros(rows, dtype=torch.int64)
        going = torch.ones(rows, dtype=torch.bool)
        unfiltered = (temperature, torch.zeros_like(top_k), torch.ones_like(top_p))
        before_filters = self.mistake == "q before top-k, p after"
        for step in range(steps):
            p = softmax(target_logits[:, step], temperature, top_k, top_p)
            own = p
            offered = going & (step < draft_lengths)
            passed = torch.zeros_like(going)
            if step < steps - 1:
                shaping = unfiltered if before_filters else (temperature, top_k, top_p)
                q = softmax(draft_logits[:, step], *shaping)
                token = draft_tokens[:, step]
                passed = offered & self._passes(p, q, token, seed, position + step)
                own = self._residual(p, q, token).where((offered & ~passed).unsqueeze(1), p)
                tokens[:, step] = token.where(passed, tokens[:, step])
            ending = going & ~passed
            tokens[:, step] = self._own(own, seed, position + step).where(ending, tokens[:, step])
            accepted += passed
            going = passed
        return VerifyResult(tokens, accepted, accepted + 1)

    def _passes(self, p: Tensor, q: Tensor, token: Tensor, seed: Tensor, position: Tensor) -> Tensor:
        shared = self.mistake == "accept shares the draft's noise"
        uniform = torch.from_numpy(_uniforms(seed, position, philox.DRAFT if shared else philox.ACCEPT))
        p_token, q_token = (distribution.gather(1, token.unsqueeze(1)).squeeze(1) for distribution in (p, q))
        if self.mistake == "acceptance x 1.02":
            p_token = 1.02 * p_token
        if self.mistake == "draft law dropped":
            q_token = torch.ones_like(q_token)
        return uniform * q_token < p_token

    def _residual(self, p: Tensor, q: Tensor, token: Tensor) -> Tensor:
        if self.mistake == "residual from p":
            return p
        if self.mistake == "draft law dropped":
            return p.scatter(1, token.unsqueeze(1), 0.0)
        residual = (p - q).clamp(min=0)
        return residual.where(residual.sum(-1, keepdim=True) > 0, p)

    def _own(self, distribution: Tensor, seed: Tensor, position: Tensor) -> Tensor:
        if self.mistake == "residual shares the draft's gumbel noise":
            return gumbel_pick(distribution, seed, position)
        shared = self.mistake == "residual shares the draft's noise"
        purpose = philox.DRAFT if shared else philox.RESIDUAL
        return pick(distribution, torch.from_numpy(_uniforms(seed, position, purpose)))


@dataclass(frozen=True)
class PlainBlockVerifier:
    """As `PlainVerifier`, by the block rule; every row offers all its drafts."""

    mistake: BlockMistake = "none"

    def __call__(
        self,
        target_logits: Tensor,
        draft_logits: Tensor,
        draft_tokens: Tensor,
        draft_lengths: Tensor,
        temperature: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        seed: Tensor,
        position: Tensor,
    ) -> VerifyResult:
        rows, steps, size = target_logits.shape
        drafts, shaping = steps - 1, (temperature, top_k, top_p)
        assert bool((draft_lengths == drafts).all())
        p = [softmax(target_logits[:, step], *shaping) for step in range(steps)]
        q = [softmax(draft_logits[:, step], *shaping) for step in range(drafts)]
        q.append(torch.zeros(rows, size, dtype=torch.float64))
        of_step = position << 32  # each step has noise of its own
        accepted = torch.zeros(rows, dtype=torch.int64)
        found = torch.zeros(rows, dtype=torch.bool)
        ratio = torch.ones(rows, dtype=torch.float64)
        own = (p[0] - q[0]).clamp(min=0)
        own = own.where(own.sum(-1, keepdim=True) > 0, p[0])
        for kept in range(1, steps):
            token = draft_tokens[:, kept - 1 : kept]
            ratio = ratio * (p[kept - 1].gather(1, token) / q[kept - 1].gather(1, token)).squeeze(1)
            if self.mistake != "ratio not capped at 1":
                ratio = ratio.clamp(max=1)
            excess = (ratio.unsqueeze(1) * p[kept] - q[kept]).clamp(min=0)
            total = excess.sum(-1)
            which = 0 if self.mistake == "one uniform for every run" else kept - 1
            uniform = torch.from_numpy(_uniforms(seed, position + which, philox.ACCEPT | of_step))
            passed = uniform * (total + 1 - ratio) < total
            if self.mistake == "the shortest run that passes":
                passed &= ~found
            found |= passed
            if self.mistake == "residual without the ratio":
                excess = (p[kept] - q[kept]).clamp(min=0)
            accepted = torch.where(passed, kept, accepted)
            own = excess.where(passed.unsqueeze(1), own)
        uniform = torch.from_numpy(_uniforms(seed, position + accepted, philox.RESIDUAL | of_step))
        tokens = torch.nn.functional.pad(draft_tokens, (0, 1))
        tokens = tokens.where(torch.arange(steps) < accepted.unsqueeze(1), -1)
        tokens.scatter_(1, accepted.unsqueeze(1), pick(own, uniform).unsqueeze(1))
        return VerifyResult(tokens, accepted, accepted + 1)
