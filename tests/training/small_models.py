"""Small random Llama pairs, their tokenizers and traffic, built in the test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import torch
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 32
CONTEXT_TOKENS = 64


def small_model(
    seed: int, *, vocabulary: int = VOCABULARY, sharpness: float = 4.0, layers: int = 1
) -> LlamaForCausalLM:
    """Untied, with a scaled head, so that the distributions of a random target are far from uniform."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=layers,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=CONTEXT_TOKENS,
            initializer_range=0.5,
            bos_token_id=None,
            eos_token_id=0,
        )
    )
    model.lm_head.weight.data *= sharpness / 4
    model.train(False)
    return model


def small_tokenizer(vocabulary: int = VOCABULARY, prefix: str = "t") -> PreTrainedTokenizerFast:
    words = {f"{prefix}{token}": token for token in range(vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token=f"{prefix}0"))
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=f"{prefix}0"
    )


def save_directory(
    directory: Path, model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast | None = None
) -> Path:
    model.save_pretrained(directory)
    (tokenizer or small_tokenizer(model.config.vocab_size)).save_pretrained(directory)
    return directory


def write_traffic(
    path: Path,
    target: LlamaForCausalLM,
    *,
    requests: int,
    seed: int,
    tokens: tuple[int, int] = (1, VOCABULARY),
    segment: str = "default",
    prompt_tokens: int = 6,
    output_tokens: int = 10,
) -> Path:
    """The target's own sampled continuations of random prompts with token ids from a range."""
    torch.manual_seed(seed)
    prompts = torch.randint(*tokens, (requests, prompt_tokens))
    rows: torch.Tensor = cast("Any", target).generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        do_sample=True,
        top_k=0,
        max_new_tokens=output_tokens,
        min_new_tokens=output_tokens,
        pad_token_id=0,
    )
    lines = [
        {"segment": segment, "prompt_token_ids": row[:prompt_tokens], "output_token_ids": row[prompt_tokens:]}
        for row in rows.tolist()
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path
