"""One long token stream per domain, and batches cut from them that depend on (seed, step) only."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from driftguard_training import corpus

TokenStreams = Mapping[str, torch.Tensor]  # domain -> [tokens], documents joined by end-of-text

_CONTINUED_AT_ONCE = 64


def token_streams(
    tokenizer: PreTrainedTokenizerFast, names: tuple[str, ...], split: corpus.Split
) -> TokenStreams:
    """The documents of each domain as one stream of token ids."""
    return {name: _stream(tokenizer, corpus.documents(name, split)) for name in names}


def batch(
    streams: TokenStreams, shares: Mapping[str, float], rows: int, length: int, seed: int, step: int
) -> torch.Tensor:
    """Random windows [rows, length], each from a stream drawn with its share.

    Drawn from (seed, step) alone, so that an interrupted training resumes on the same data.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    names = list(shares)
    weights = torch.tensor([shares[name] for name in names])
    chosen = torch.multinomial(weights, rows, replacement=True, generator=generator)
    return torch.stack([_window(streams[names[i]], length, generator) for i in chosen.tolist()])


@torch.no_grad()
def continuations(
    target: PreTrainedModel,
    streams: TokenStreams,
    shares: Mapping[str, float],
    count: int,
    length: int,
    seed: int,
) -> TokenStreams:
    """`count` texts of `length` tokens as one stream: half of each is real, the target wrote the rest."""
    torch.manual_seed(seed)
    texts = []
    for start in range(0, count, _CONTINUED_AT_ONCE):
        rows = min(_CONTINUED_AT_ONCE, count - start)
        begun = batch(streams, shares, rows, length // 2, seed + 2, start)  # [rows, length / 2]
        continued = cast("Any", target).generate(
            begun,
            attention_mask=torch.ones_like(begun),
            max_new_tokens=length - length // 2,
            do_sample=True,
            top_k=0,  # the plain distribution; the library's default would truncate it
            pad_token_id=target.config.eos_token_id,
        )
        texts.append(continued.flatten())
    return {"continuations": torch.cat(texts)}


def _window(stream: torch.Tensor, length: int, generator: torch.Generator) -> torch.Tensor:
    start = int(torch.randint(len(stream) - length, (1,), generator=generator))
    return stream[start : start + length]


def _stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> torch.Tensor:
    encoded = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor([token for ids in encoded for token in [*ids, tokenizer.eos_token_id]])
