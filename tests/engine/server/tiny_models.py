"""A tiny random Llama pair with a byte tokenizer: real text in, real text out, nothing downloaded."""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

EOS = "<|end|>"
CONTEXT_TOKENS = 256
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def byte_tokenizer(chat_template: str | None = None) -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {EOS: 0} | {character: index for index, character in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)  # type: ignore[no-untyped-call]
    fast.chat_template = chat_template
    return fast


def save_model(
    directory: Path,
    *,
    seed: int,
    tokenizer: PreTrainedTokenizerFast | None = None,
    context: int = CONTEXT_TOKENS,
) -> Path:
    """Same seed, same model: a draft with the target's seed is accepted always."""
    torch.manual_seed(seed)
    fast = tokenizer or byte_tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(fast),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=context,
            initializer_range=0.3,
            bos_token_id=None,
            eos_token_id=0,
        )
    )
    model.save_pretrained(directory)
    fast.save_pretrained(directory)
    return directory
