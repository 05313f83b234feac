"""gpt-fast with the same two models, where GPT_FAST_DIRECTORY names a checkout of it.

Tried with its commit e2cfa34; since 61c193d (August 2024), which batches, its speculation fails.
"""

from __future__ import annotations

import inspect
import os
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tests.gpu.check.loop.models import Models
from tests.gpu.check.loop.synthetic import Shape
from tests.gpu.check.rows import PeerSpeed

NAME = "gpt-fast"
CHECKOUT = "GPT_FAST_DIRECTORY"


def gpt_fast(
    models: Models, acceptance: float, drafts: int, tokens: int, *, compiled: bool = True
) -> PeerSpeed:
    """Compiled as its own main does. What goes wrong in it is its note."""
    try:
        return _measured(models, acceptance, drafts, tokens, compiled=compiled)
    except Exception as problem:  # noqa: BLE001 - its own, or torch's that compiles it
        first = str(problem).partition(" Stack trace")[0].partition("\n")[0]
        return PeerSpeed(NAME, acceptance, None, f"failed: {type(problem).__name__}: {first}")


def _measured(models: Models, acceptance: float, drafts: int, tokens: int, *, compiled: bool) -> PeerSpeed:
    checkout = os.environ.get(CHECKOUT)
    if checkout is None or not (Path(checkout) / "generate.py").is_file():
        return PeerSpeed(NAME, acceptance, None, f"not on this machine ({CHECKOUT} names no checkout)")
    sys.path.insert(0, checkout)
    try:
        program, shapes = import_module("generate"), import_module("model")
    finally:
        sys.path.remove(checkout)
    if compiled:
        for name in ("model_forward", "decode_one_token"):
            function = torch.compile(getattr(program, name), mode="reduce-overhead", fullgraph=True)
            setattr(program, name, function)
    pair = models.setting.pair
    target = _copy(shapes, pair.target, models.target_module)
    draft = _copy(shapes, pair.draft, models.draft_module(acceptance))
    _generate(program, models, target, draft, drafts, tokens)  # compiles
    seconds, made = _generate(program, models, target, draft, drafts, tokens)
    return PeerSpeed(NAME, acceptance, made / seconds, f"K = {drafts}, compiled")


def _copy(shapes: Any, shape: Shape, module: Any) -> Any:
    """Rotary positions differ in order, which does not matter where attention adds nothing."""
    arguments = shapes.ModelArgs(
        block_size=2048,
        vocab_size=shape.vocabulary,
        n_layer=shape.layers,
        n_head=shape.heads,
        n_local_heads=shape.kv_heads,
        dim=shape.hidden,
        intermediate_size=shape.intermediate,
    )
    with torch.device("meta"):
        made = shapes.Transformer(arguments)
    weights = {
        "tok_embeddings.weight": module.model.embed_tokens.weight,
        "norm.weight": module.model.norm.weight,
        "output.weight": module.lm_head.weight,
    }
    for index, layer in enumerate(module.model.layers):
        attention, mlp, name = layer.self_attn, layer.mlp, f"layers.{index}."
        parts = [attention.q_proj.weight, attention.k_proj.weight, attention.v_proj.weight]
        weights |= {
            name + "attention.wqkv.weight": torch.cat(parts),
            name + "attention.wo.weight": attention.o_proj.weight,
            name + "feed_forward.w1.weight": mlp.gate_proj.weight,
            name + "feed_forward.w3.weight": mlp.up_proj.weight,
            name + "feed_forward.w2.weight": mlp.down_proj.weight,
            name + "attention_norm.weight": layer.input_layernorm.weight,
            name + "ffn_norm.weight": layer.post_attention_layernorm.weight,
        }
    made.load_state_dict(weights, assign=True)
    return made.eval()


def _generate(
    program: Any, models: Models, target: Any, draft: Any, drafts: int, tokens: int
) -> tuple[float, int]:
    prompt = models.contexts[: models.setting.prompt_tokens].int()
    known = inspect.signature(program.generate).parameters
    wanted = {"batch_size": 1} if "batch_size" in known else {}
    begin = time.perf_counter()
    text, _ = program.generate(
        target,
        prompt,
        tokens,
        interactive=False,
        draft_model=draft,
        speculate_k=drafts,
        temperature=1.0,
        top_k=None,
        **wanted,
    )
    if text.device.type == "cuda":
        torch.cuda.synchronize(text.device)
    return time.perf_counter() - begin, text.shape[-1] - len(prompt)
