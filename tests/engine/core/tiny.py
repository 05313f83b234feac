"""Tiny random models of several kinds over one tokenizer, and what tests ask an engine for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch
from driftguard_engine.core import FinishedRequest, Request, RequestOutput, SamplingParams
from driftguard_engine.engine import Engine
from tokenizers import Tokenizer, models
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from tests.engine.server.tiny_models import byte_tokenizer

CONTEXT = 160
_LLAMA = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_SHAPES: dict[str, dict[str, Any]] = {
    "llama": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA | {"head_dim": 16},
    "mistral": _LLAMA | {"sliding_window": None},
    "phi3": _LLAMA,
    "odd_llama": _LLAMA
    | {"hidden_size": 30, "intermediate_size": 37, "num_attention_heads": 3, "num_key_value_heads": 3},
    "gpt2": {"n_embd": 33, "n_layer": 2, "n_head": 3, "n_positions": CONTEXT},
    "opt": {  # embeddings narrower than the layers
        "hidden_size": 48,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    },
    "gpt_neox": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "is_decoder": True,
    },
}


def new_module(kind: str, *, seed: int, vocabulary: int, **changes: Any) -> Any:
    """A transformers model with weights wide enough that its distributions are far from uniform."""
    shape = {"max_position_embeddings": CONTEXT, "vocab_size": vocabulary} | _SHAPES.get(kind, {}) | changes
    if kind == "gpt2":
        shape.pop("max_position_embeddings")
    config = AutoConfig.for_model(
        kind.removeprefix("odd_"),
        bos_token_id=None,
        eos_token_id=0,
        pad_token_id=None,
        **shape,
    )
    torch.manual_seed(seed)
    module = AutoModelForCausalLM.from_config(config).eval()  # type: ignore[no-untyped-call]
    for parameter in module.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.25)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return module


@cache
def plain_greedy(kind: str, prompt: tuple[int, ...], count: int) -> tuple[int, ...]:
    """transformers' own forward over the whole sequence, one argmax after another."""
    module = new_module(kind, seed=3, vocabulary=257)
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(count):
            ids.append(int(module(torch.tensor([ids])).logits[0, -1].argmax()))
    return tuple(ids[len(prompt) :])


def save(
    directory: Path,
    kind: str = "llama",
    *,
    seed: int = 0,
    noise: float = 0.0,
    tokenizer: PreTrainedTokenizerFast | None = None,
    **changes: Any,
) -> str:
    """noise > 0: the same model with disturbed weights, which agrees with it often but not always."""
    fast = tokenizer or byte_tokenizer()
    module = new_module(kind, seed=seed, vocabulary=len(fast), **changes)
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += noise * torch.randn(parameter.shape, generator=generator)
    module.save_pretrained(directory)
    fast.save_pretrained(directory)
    return str(directory)


def letter_tokenizer(count: int) -> PreTrainedTokenizerFast:
    """`count` tokens: <end>, a, b, c, ..."""
    vocabulary = {"<end>": 0} | {chr(ord("a") + index): index + 1 for index in range(count - 1)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="a"))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")  # type: ignore[no-untyped-call]


def request(
    name: str = "r", prompt: Sequence[int] | str = (5, 6, 7), max_tokens: int = 12, **params: Any
) -> Request:
    ids = byte_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
    params = {"temperature": 0.0, "ignore_eos": True} | params
    return Request(
        name, tuple(ids), SamplingParams(max_tokens=max_tokens, **params), datetime(2026, 1, 1, tzinfo=UTC)
    )


def drain(engine: Engine) -> list[RequestOutput]:
    outputs: list[RequestOutput] = []
    for _ in range(5000):
        if not engine.has_work():
            return outputs
        outputs += engine.step()
    raise AssertionError("the engine does not come to an end")


def finished(outputs: Iterable[RequestOutput]) -> dict[str, FinishedRequest]:
    return {output.request_id: output.finished for output in outputs if output.finished is not None}


def serve(engine: Engine, *requests: Request) -> dict[str, FinishedRequest]:
    for each in requests:
        engine.submit(each)
    return finished(drain(engine))


def tokens(engine: Engine, *requests: Request) -> dict[str, tuple[int, ...]]:
    return {name: each.output_token_ids for name, each in serve(engine, *requests).items()}
