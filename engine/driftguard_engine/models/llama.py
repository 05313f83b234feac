"""The lean path: the Llama family as plain functions over packed weights.

Llama, Mistral, Qwen2 and Qwen3: RMSNorm, rotary positions, grouped-query attention, SwiGLU. For small models
on a CPU the module tree of transformers costs more than the arithmetic; here a layer is about thirty calls.

Bits on the CPU: all tokens of a call run through the linear layers as rows of one matrix [N, hidden], which
are independent by `linear`; norms and rotations act within a row with exactly rounded operations; attention
runs per span over exactly its own length. So a span's logits depend on its own sequence alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from driftguard_engine.kv_cache import SlotCache, Span
from driftguard_engine.models.linear import MINIMUM_ROWS, Linear, choose

FAMILY = ("llama", "mistral", "qwen2", "qwen3")
FIXED_ROPE = ("default", "linear", "llama3", "yarn")
_ALIGNMENT_BYTES = 64


def supports(config: Any, max_length: int) -> bool:
    """True if the configuration is of a shape that this path computes exactly."""
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    slides = "sliding_attention" in layer_types if layer_types else config.model_type == "mistral"
    return (
        config.model_type in FAMILY
        and config.hidden_act == "silu"
        and rope.get("rope_type", "default") in FIXED_ROPE
        and rope.get("partial_rotary_factor", 1.0) in (None, 1.0)
        and not (slides and window is not None and window < max_length)
    )


@dataclass(frozen=True, slots=True)
class _Norm:
    weight: Tensor
    epsilon: float

    def apply(self, x: Tensor) -> Tensor:
        """RMSNorm over the last dimension, which is weight's last one."""
        return torch.rms_norm(x, self.weight.shape[-1:], None, self.epsilon) * self.weight


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: _Norm
    qkv: Linear
    head_norm: _Norm | None  # weight [H + Hkv, D]
    output: Linear
    mlp_norm: _Norm
    gate: Linear
    up: Linear
    down: Linear


class LeanModel:
    """A model of the Llama family with its slot cache. See `TokenModel`."""

    path: Literal["lean", "generic"] = "lean"

    def __init__(self, module: Any, slots: int, max_length: int) -> None:
        """module: the loaded transformers model; its weights are copied, so it can be dropped afterwards."""
        config = module.config
        self.vocabulary: int = config.vocab_size
        self.max_length = max_length
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = config.num_key_value_heads
        self._head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // self._heads
        self._embedding: Tensor = module.model.embed_tokens.weight.detach()
        self._layers = [self._layer(layer) for layer in module.model.layers]
        self._final_norm = _norm(module.model.norm)
        self._head = choose(module.lm_head.weight, getattr(module.lm_head, "bias", None))
        self._device, self._dtype = self._embedding.device, self._embedding.dtype
        self._cos, self._sin = self._rotation(module.model.rotary_emb)
        self._cache = SlotCache(slots, max_length, self._device, self._dtype)
        for _ in self._layers:
            self._cache.add_layer(self._kv_heads, self._head_dim, self._head_dim)
        row_bytes = (self._heads + self._kv_heads) * self._head_dim * self._dtype.itemsize
        self._rows_are_aligned = row_bytes % _ALIGNMENT_BYTES == 0

    def _layer(self, layer: Any) -> _Layer:
        attention, mlp = layer.self_attn, layer.mlp
        parts = (attention.q_proj, attention.k_proj, attention.v_proj)
        bias = None if attention.q_proj.bias is None else torch.cat([part.bias for part in parts])
        head_norm = None
        if hasattr(attention, "q_norm"):
            scales = [(attention.q_norm, self._heads), (attention.k_norm, self._kv_heads)]
            weight = torch.cat([norm.weight.detach().expand(count, -1) for norm, count in scales])
            head_norm = _Norm(weight.contiguous(), attention.q_norm.variance_epsilon)
        return _Layer(
            attention_norm=_norm(layer.input_layernorm),
            qkv=choose(torch.cat([part.weight for part in parts]), bias),
            head_norm=head_norm,
            output=choose(attention.o_proj.weight, attention.o_proj.bias),
            mlp_norm=_norm(layer.post_attention_layernorm),
            gate=choose(mlp.gate_proj.weight, mlp.gate_proj.bias),
            up=choose(mlp.up_proj.weight, mlp.up_proj.bias),
            down=choose(mlp.down_proj.weight, mlp.down_proj.bias),
        )

    def _rotation(self, rotary: Any) -> tuple[Tensor, Tensor]:
        """cos and signed sin, [max_length, 1, D]: rotated x = x * cos + roll(x, D/2) * sin."""
        positions = torch.arange(self.max_length, device=self._device)[None]
        cos, sin = rotary(torch.empty(0, dtype=self._dtype, device=self._device), positions)
        half = self._head_dim // 2
        signed = torch.cat((-sin[0, :, :half], sin[0, :, half:]), dim=-1)
        return cos[0, :, None].contiguous(), signed[:, None].contiguous()

    @torch.inference_mode()
    def forward(self, token_ids: Sequence[int], spans: Sequence[Span]) -> Tensor:
        hidden = self._final_norm.apply(self._hidden(token_ids, spans))
        return self._head.apply(hidden)[: len(token_ids)]  # [N, V]

    @torch.inference_mode()
    def prefill(self, token_ids: Sequence[int], spans: Sequence[Span]) -> None:
        self._hidden(token_ids, spans)

    def _hidden(self, token_ids: Sequence[int], spans: Sequence[Span]) -> Tensor:
        count = len(token_ids)
        padding = [0] * max(0, MINIMUM_ROWS - count)
        places = torch.tensor(self._cache.places(spans), device=self._device)  # [N]
        positions = [position for span in spans for position in range(span.start, span.end)]
        at = torch.tensor(positions + padding, device=self._device)  # [rows], rows = max(N, MINIMUM_ROWS)
        cos, sin = self._cos[at], self._sin[at]  # [rows, 1, D]
        masks = [self._mask(span) for span in spans]
        hidden = self._embedding[torch.tensor([*token_ids, *padding], device=self._device)]  # [rows, hidden]
        for index, layer in enumerate(self._layers):
            qkv = layer.qkv.apply(layer.attention_norm.apply(hidden))
            mixed = self._attend(index, layer, qkv, cos, sin, places, spans, masks)
            hidden = layer.output.plus(mixed, hidden)
            normed = layer.mlp_norm.apply(hidden)
            hidden = layer.down.plus(layer.up.times(normed, layer.gate.silu(normed)), hidden)
        return hidden

    def _attend(
        self,
        index: int,
        layer: _Layer,
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        places: Tensor,
        spans: Sequence[Span],
        masks: Sequence[Tensor | None],
    ) -> Tensor:
        """Writes the new keys and values and returns the heads' outputs [rows, H * D]."""
        split = self._heads + self._kv_heads
        heads = qkv.view(qkv.shape[0], split + self._kv_heads, self._head_dim)
        turning = heads[:, :split]  # queries and keys
        if layer.head_norm is not None:
            turning = layer.head_norm.apply(turning)
        turned = turning * cos + turning.roll(self._head_dim // 2, -1) * sin
        count = places.shape[0]
        self._cache.keys[index].index_copy_(0, places, turned[:count, self._heads :])
        self._cache.values[index].index_copy_(0, places, heads[:count, split:])
        outputs, first = [], 0
        for span, mask in zip(spans, masks, strict=True):
            queries = turned[first : first + span.count, : self._heads]  # [T, H, D]
            outputs.append(self._attend_span(index, queries, span, mask))
            first += span.count
        if first < qkv.shape[0]:
            outputs.append(outputs[0].new_zeros(qkv.shape[0] - first, outputs[0].shape[1]))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _attend_span(self, index: int, queries: Tensor, span: Span, mask: Tensor | None) -> Tensor:
        """[T, H * D]; query heads of one key head are folded into its rows."""
        keys, values = self._cache.read(index, span)  # [end, Hkv, D]
        group = self._heads // self._kv_heads
        if group > 1:
            queries = queries.view(span.count, self._kv_heads, group, self._head_dim).transpose(0, 1)
            folded = queries.transpose(1, 2).reshape(1, self._kv_heads, group * span.count, self._head_dim)
        else:
            folded = queries.transpose(0, 1)[None]
        if not self._rows_are_aligned:
            folded = folded.clone()
        mixed = F.scaled_dot_product_attention(
            folded, keys.transpose(0, 1)[None], values.transpose(0, 1)[None], attn_mask=mask
        )  # [1, Hkv, G * T, D]
        by_head = mixed.view(self._kv_heads, group, span.count, self._head_dim)
        return by_head.permute(2, 0, 1, 3).reshape(span.count, -1)

    def _mask(self, span: Span) -> Tensor | None:
        """Additive [G * T, end]: token t of the span sees positions up to start + t."""
        if span.count == 1:
            return None
        mask = torch.full((span.count, span.end), float("-inf"), dtype=self._dtype, device=self._device)
        mask.triu_(span.start + 1)
        return mask.repeat(self._heads // self._kv_heads, 1)


def _norm(module: Any) -> _Norm:
    return _Norm(module.weight.detach(), module.variance_epsilon)
