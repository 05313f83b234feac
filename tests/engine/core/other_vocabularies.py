"""Small tokenizers of different families, and drafts of them that think as the target does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from driftguard_engine.models.token_texts import shared_tokens, token_texts
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast


def byte_level(
    merged: Sequence[str],
    *,
    first: int = 0,
    specials: Sequence[str] = ("<|end|>",),
    bytes_of: str | None = None,
) -> PreTrainedTokenizerFast:
    """Specials, then bytes (of `bytes_of`, else all), rotated by `first`, then what is merged of two known
    tokens. A word is not cut."""
    alphabet = sorted(bytes_of or pre_tokenizers.ByteLevel.alphabet())
    alphabet = alphabet[first:] + alphabet[:first]
    tokens = [*specials, *alphabet, *merged]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    merges = [
        next(
            (token[:cut], token[cut:])
            for cut in range(1, len(token))
            if token[:cut] in vocabulary and token[cut:] in vocabulary
        )
        for token in merged
    ]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in specials])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=specials[0])  # type: ignore[no-untyped-call]


def sentencepiece(merged: Sequence[str]) -> PreTrainedTokenizerFast:
    """As Llama 2's: <s> before each text, a space before its first word, bytes where nothing else fits."""
    letters = [*"▁abcdefghijklmnopqrstuvwxyz"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *letters, *merged]
    vocabulary = {token: place for place, token in enumerate(tokens)}
    merges = [
        (token[:1], token[1:]) if token[1:] in vocabulary else (token[:-1], token[-1:]) for token in merged
    ]
    model = models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in ("<unk>", "<s>", "</s>")])
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def save_translated(
    directory: Path,
    target: Any,
    ours: PreTrainedTokenizerFast,
    own: PreTrainedTokenizerFast,
    noise: float = 0.0,
) -> str:
    """The target with its embeddings in the order of another tokenizer: of the tokens that both have it
    thinks as the target does; others it knows at random. noise: disturbs all weights."""
    pairs = shared_tokens(*(token_texts(each, directory, field="test") for each in (ours, own)))
    mine, theirs = (torch.tensor(each) for each in zip(*pairs, strict=True))
    torch.manual_seed(17)
    module = type(target)(type(target.config)(**target.config.to_dict() | {"vocab_size": len(own)})).eval()
    state = {name: weight.clone() for name, weight in target.state_dict().items()}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weight = 0.25 * torch.randn(len(own), target.config.hidden_size)
        weight[theirs] = target.state_dict()[name][mine]
        state[name] = weight
    module.load_state_dict(
        {name: weight + noise * torch.randn(weight.shape) for name, weight in state.items()}
    )
    module.save_pretrained(directory)
    own.save_pretrained(directory)
    return str(directory)
