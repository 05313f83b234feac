"""The weights of a Llama-like model, ordered for few large matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from driftguard_engine.kernels import layers
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.layer_kernels import LayerKernels, LayerOps, obstacle
from driftguard_engine.kernels.layer_self_test import failure
from driftguard_engine.kernels.layers import Norm
from driftguard_engine.models.linear import Gated, Linear, choose, choose_gated

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
FIXED_ROPE = ("default", "linear", "llama3", "yarn")


def supports(config: Any, max_length: int) -> bool:
    """True if the configuration is of a shape that this path computes exactly.

    Quantised weights are not supported: a layer's `weight` then needs scales, or code, of its own.
    """
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in layer_types if layer_types else config.model_type == "mistral"
    return (
        config.model_type in FAMILY
        and getattr(config, "quantization_config", None) is None
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in FIXED_ROPE
        and rope.get("partial_rotary_factor", 1.0) in (None, 1.0)
        and not (slides and window is not None and window < max_length)
    )


@dataclass(frozen=True, slots=True)
class Heads:
    """H query heads, which share Hkv heads of keys and values, of D numbers each."""

    queries: int
    keys: int
    dim: int


@dataclass(frozen=True, slots=True)
class Layer:
    attention_norm: Norm
    qkv: Linear
    head_norm: Norm | None  # weight [H + Hkv, D]
    output: Linear
    mlp_norm: Norm
    gated: Gated
    down: Linear


def heads_of(config: Any) -> Heads:
    queries: int = config.num_attention_heads
    dim: int = getattr(config, "head_dim", None) or config.hidden_size // queries
    return Heads(queries, config.num_key_value_heads, dim)


def choose_ops(
    launcher: Launcher | None, heads: Heads, hidden: int, intermediate: int, like: Tensor
) -> tuple[LayerOps, str | None]:
    """What computes layers of these sizes where they decode, and why the kernels cannot; without a launcher
    torch does. like: has the device and the type."""
    found = obstacle(like.dtype, hidden, intermediate, heads.dim)
    if launcher is not None and found is None:
        found = failure(launcher, like.dtype, heads.queries // heads.keys, heads.dim, like.device)
    return (layers if launcher is None or found is not None else LayerKernels(launcher)), found


def layer_of(module: Any, heads: Heads, ops: LayerOps) -> Layer:
    """module: a decoder layer of transformers."""
    attention, mlp = module.self_attn, module.mlp
    parts = (attention.q_proj, attention.k_proj, attention.v_proj)
    bias = None if attention.q_proj.bias is None else torch.cat([part.bias for part in parts])
    head_norm = None
    if hasattr(attention, "q_norm"):
        scales = [(attention.q_norm, heads.queries), (attention.k_norm, heads.keys)]
        weight = torch.cat([norm.weight.detach().expand(count, -1) for norm, count in scales])
        head_norm = Norm(weight.contiguous(), attention.q_norm.variance_epsilon)
    return Layer(
        attention_norm=norm_of(module.input_layernorm),
        qkv=choose(torch.cat([part.weight for part in parts]), bias, ops),
        head_norm=head_norm,
        output=choose(attention.o_proj.weight, attention.o_proj.bias, ops),
        mlp_norm=norm_of(module.post_attention_layernorm),
        gated=choose_gated(mlp.gate_proj, mlp.up_proj, ops),
        down=choose(mlp.down_proj.weight, mlp.down_proj.bias, ops),
    )


class NoNorm(Norm):
    """In place of a norm that a head lacks."""

    def apply(self, x: Tensor) -> Tensor:
        return x


def norm_of(module: Any) -> Norm:
    """module: of transformers; None or an identity: there is none."""
    if module is None or isinstance(module, nn.Identity):
        return NoNorm(torch.empty(0), 0.0)
    return Norm(module.weight.detach(), module.variance_epsilon)


def rotation(rotary: Any, positions: int, dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and signed sin, [positions, D]: rotated x = x * cos + roll(x, D/2) * sin."""
    at = torch.arange(positions, device=like.device)[None]
    cos, sin = rotary(torch.empty(0, dtype=like.dtype, device=like.device), at)
    half = dim // 2
    return cos[0].contiguous(), torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1).contiguous()
