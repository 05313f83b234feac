"""Training and saving an adapter of Speculative Streaming (Bhendawade et al. 2024) for a target that stays
as it is: the paper's lossless mode."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import torch
from driftguard_engine.models.llama_weights import heads_of
from driftguard_engine.models.medusa_head import NODES, Choices
from driftguard_engine.models.streaming_adapter import StreamingAdapter, StreamingConfig
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from driftguard_training.acceptance import chain_loss
from driftguard_training.medusa import most_taken
from driftguard_training.model_directories import save_files
from driftguard_training.settings import Loss

WEIGHTS = "streaming_adapter.safetensors"


def new_adapter(target: PreTrainedModel, layers: int, rank: int, streams: int) -> StreamingAdapter:
    """Every stream begins as the main one."""
    config: Any = target.config
    sizes = config.hidden_size, config.intermediate_size, heads_of(config)
    adapter = StreamingAdapter(StreamingConfig(layers, rank, streams, ()), *sizes)
    for name, parameter in adapter.named_parameters():
        if name.endswith(".A"):
            torch.nn.init.kaiming_uniform_(parameter, a=math.sqrt(5))
        else:
            torch.nn.init.zeros_(parameter)
    return adapter


def stream_logits(adapter: StreamingAdapter, target: PreTrainedModel, states: tuple[Tensor, ...]) -> Tensor:
    """Logits [R, S, L, V] of each stream behind every place. states: of the target, as `hidden_states` of
    transformers, each [R, L, H]."""
    model, config = cast("Any", target).model, target.config
    first = len(model.layers) - len(adapter.layers)
    hidden = states[first][:, None] + adapter.embeddings[:, None]  # [R, S, L, H]
    streams, places = hidden.shape[1:3]
    heads = heads_of(config)
    group = heads.queries // heads.keys
    at = torch.arange(places + streams)
    cos, sin = (each[0] for each in model.rotary_emb(hidden, at[None]))  # [L + S, D]
    stream_at = at[:places] + at[1 : 1 + streams, None]  # [S, L]: where what the stream stands for would be
    causal = torch.full((places, places), -torch.inf).triu(1)
    earlier = torch.full((streams, streams), -torch.inf).triu(1)[:, None]

    def split(projected: Tensor) -> Tensor:  # [R, S, L, heads * D] -> [R, heads, S, L, D]
        return projected.view(*projected.shape[:-1], -1, heads.dim).permute(0, 3, 1, 2, 4)

    for layer, state, lora in zip(model.layers[first:], states[first:-1], adapter.layers, strict=True):
        attention, mlp, low = layer.self_attn, layer.mlp, cast("Any", lora)

        def apply(name: str, module: Any, x: Tensor, low: Any = low) -> Tensor:
            added: Tensor = module(x) + low[name](x)
            return added

        with torch.no_grad():
            normed = layer.input_layernorm(state)[:, None]
            keys, values = split(attention.k_proj(normed)), split(attention.v_proj(normed))
            keys = attention.k_norm(keys) if hasattr(attention, "k_norm") else keys
            _, keys = apply_rotary_pos_emb(keys, keys, cos[None, None, :places], sin[None, None, :places])
        normed = layer.input_layernorm(hidden)
        query, key, value = (
            split(apply(name, getattr(attention, name), normed)) for name in ("q_proj", "k_proj", "v_proj")
        )
        if hasattr(attention, "q_norm"):
            query, key = attention.q_norm(query), attention.k_norm(key)
        query, key = apply_rotary_pos_emb(query, key, cos[None, stream_at], sin[None, stream_at])
        keys, values, key, value = (each.repeat_interleave(group, 1) for each in (keys, values, key, value))
        query = query * attention.scaling
        own = torch.einsum("rhjtd,rhitd->rhjti", query, key) + earlier
        weights = torch.cat([query @ keys.transpose(-1, -2) + causal, own], -1).softmax(-1)
        mixed = weights[..., :places] @ values
        mixed = mixed + torch.einsum("rhjti,rhitd->rhjtd", weights[..., places:], value)
        mixed = mixed.permute(0, 2, 3, 1, 4).flatten(-2)
        hidden = hidden + apply("o_proj", attention.o_proj, mixed)
        normed = layer.post_attention_layernorm(hidden)
        gated = mlp.act_fn(mlp.gate_proj(normed)) * mlp.up_proj(normed)
        hidden = hidden + apply("down_proj", mlp.down_proj, gated)
    logits: Tensor = cast("Any", target).lm_head(model.norm(hidden))
    return logits


def adapter_loss(
    adapter: StreamingAdapter, target: PreTrainedModel, tokens: Tensor, loss: Loss
) -> tuple[Tensor, list[float]]:
    """The mean loss of all streams at every place of tokens [R, L], and the mean acceptance probability of
    what each drafts."""
    with torch.no_grad():
        told = target(input_ids=tokens, output_hidden_states=True)
        p = torch.softmax(told.logits, -1)  # [R, L, V]
    counted = torch.ones(tokens.shape[0], tokens.shape[1] + 1, dtype=torch.bool)
    drafted = stream_logits(adapter, target, told.hidden_states).unbind(1)
    total, accepted = chain_loss(p, counted, drafted, loss)
    return total, [each.mean().item() for each in accepted]


@torch.no_grad()
def measured_tree(
    adapter: StreamingAdapter, target: PreTrainedModel, tokens: Tensor, nodes: int = NODES
) -> Choices:
    """As of Medusa heads."""
    states = target(input_ids=tokens, output_hidden_states=True).hidden_states
    drafted = stream_logits(adapter, target, states)
    places = tokens.shape[1] - drafted.shape[1] - 1  # of which every stream's token is known
    return most_taken(drafted[:, :, :places].unbind(1), tokens, nodes)


def save_adapter(
    output: Path,
    adapter: StreamingAdapter,
    choices: Choices,
    dtype: torch.dtype,
    provenance: Mapping[str, object],
) -> str:
    """Write a directory as `driftguard_engine.models.streaming_adapter` reads it, atomically; returns its
    version."""
    weights = {name: each.detach().to(dtype).contiguous() for name, each in adapter.state_dict().items()}
    config = {
        "streaming_layers": adapter.config.layers,
        "streaming_rank": adapter.config.rank,
        "streaming_streams": adapter.config.streams,
        "streaming_choices": [list(path) for path in choices],
    }

    def write(directory: Path) -> None:
        save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    return save_files(output, write, provenance)
