"""A target that costs what a model of 7B parameters costs, and drafts that it accepts at a stated rate.

Made in memory, without a download. Every layer is as large as a real one and full of random numbers, but
what it adds is scaled so far down that rounding drops it: embeddings consist of +1 and -1, and 1 + 2**-30
is 1. So the logits are those of a tiny model, in which the next token follows from the newest one alone, at
the cost of the large one. A draft has the same logits, disturbed: how much is found by bisection, until the
mean of sum(min(p, q)), the part of its drafts that the target accepts, is what was asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, LlamaConfig

FADED = 2.0**-30  # of what a layer adds: exact in every binary type, and far below a rounding of 1
SHARPNESS = 1.5  # of the distributions: 1 is where so many normal logits begin to have a few likely tokens
CHAINS, CHAIN_STEPS, ROWS = 2048, 12, 256
BISECTIONS = 14


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a Llama."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int

    def config(self, positions: int) -> LlamaConfig:
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=positions,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=None,
        )


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its drafts; the target's hidden size is a multiple of the draft's."""

    name: str
    target: Shape
    draft: Shape


# Llama 3.1 8B's shape reads 7.5e9 weights a token, its embeddings apart. Published drafts for 7B models have
# 68e6 to 160e6 parameters (Miao et al., SpecInfer, 2024): here 31e6 in two layers, and 131e6 in the head.
LARGE = Pair(
    "target of Llama 3.1 8B's shape, draft of 2 layers of 1,024",
    Shape(4096, 14336, 32, 32, 8, 128_256),
    Shape(1024, 4096, 2, 16, 8, 128_256),
)
SMALL = Pair("tiny models", Shape(64, 96, 2, 4, 2, 96), Shape(32, 48, 1, 2, 1, 96))


@dataclass(frozen=True, slots=True)
class Bigrams:
    """logits(next | newest) = signs[newest] @ successors.T, and of a draft with successors + d * noise."""

    signs: Tensor  # [V, R], +1 and -1
    successors: Tensor  # [V, R]
    noise: Tensor  # [V, R]

    @classmethod
    def draw(cls, vocabulary: int, rank: int, dtype: torch.dtype, device: torch.device, seed: int) -> Bigrams:
        random = torch.Generator(device).manual_seed(seed)
        spread = SHARPNESS * math.sqrt(2 * math.log(vocabulary) / rank)
        size = (vocabulary, rank)
        signs = torch.randint(0, 2, size, generator=random, device=device) * 2 - 1
        successors, noise = (
            (spread * torch.randn(size, generator=random, device=device)).to(dtype) for _ in range(2)
        )
        return cls(signs.to(dtype), successors, noise)

    def disturbed(self, disturbance: float) -> Tensor:
        return self.successors + disturbance * self.noise

    def contexts(self, chains: int = CHAINS, steps: int = CHAIN_STEPS, seed: int = 0) -> Tensor:
        """Newest tokens as they come up in text that the target writes at temperature 1, int64 [chains]."""
        random = torch.Generator(self.signs.device).manual_seed(seed)
        tokens = torch.randint(0, len(self.signs), (chains,), generator=random, device=self.signs.device)
        for _ in range(steps):
            drawn = [
                self.distribution(part).multinomial(1, generator=random)[:, 0]
                for part in torch.split(tokens, ROWS)
            ]
            tokens = torch.cat(drawn)
        return tokens

    def distribution(self, newest: Tensor, disturbance: float = 0.0) -> Tensor:
        """float32 [N, V]."""
        return F.linear(self.signs[newest], self.disturbed(disturbance)).float().softmax(-1)

    def overlap(self, contexts: Tensor, disturbance: float) -> float:
        """Mean over contexts of sum(min(p, q)): how often a draft is accepted (Leviathan et al. 2023)."""
        shared = [
            torch.minimum(self.distribution(part), self.distribution(part, disturbance)).sum(-1)
            for part in torch.split(contexts, ROWS)
        ]
        return float(torch.cat(shared).mean())

    def entropy_nats(self, contexts: Tensor) -> float:
        each = (self.distribution(part) for part in torch.split(contexts, ROWS))
        return float(torch.cat([torch.special.entr(part).sum(-1) for part in each]).mean())


def find_disturbance(acceptance: float, overlap: Callable[[float], float]) -> float:
    """Where overlap, which falls from 1, is the acceptance. Raises ValueError where it never falls so low."""
    low, high = 0.0, 1.0
    while overlap(high) > acceptance:
        low, high = high, 2 * high
        if high > 2**10:
            raise ValueError(f"no disturbance brings the acceptance down to {acceptance:g}")
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        low, high = (middle, high) if overlap(middle) > acceptance else (low, middle)
    return (low + high) / 2


def new_module(
    shape: Shape, signs: Tensor, successors: Tensor, positions: int, dtype: torch.dtype, device: torch.device
) -> Any:
    """A transformers Llama, on the device from the start, whose logits are signs[newest] @ successors.T."""
    with torch.device(device):
        module = AutoModelForCausalLM.from_config(shape.config(positions), dtype=dtype).eval()  # type: ignore[no-untyped-call]
    copies = shape.hidden // signs.shape[1]
    with torch.no_grad():
        for layer in module.model.layers:
            layer.self_attn.o_proj.weight.mul_(FADED)
            layer.mlp.down_proj.weight.mul_(FADED)
        module.model.embed_tokens.weight.copy_(signs.repeat(1, copies))
        module.lm_head.weight.copy_(successors.repeat(1, copies) / copies)
    return module


def weight_bytes_per_step(module: Any) -> int:
    """What one forward pass must read of the weights: all but the embeddings, of which it reads rows."""
    embedding = module.model.embed_tokens.weight
    every = [each for each in module.parameters() if each is not embedding]
    return sum(each.numel() * each.element_size() for each in every)


def cache_bytes_per_token(shape: Shape, dtype: torch.dtype) -> int:
    """Keys and values of one token."""
    return 2 * shape.layers * shape.kv_heads * (shape.hidden // shape.heads) * dtype.itemsize
