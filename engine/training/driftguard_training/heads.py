"""Training and saving an EAGLE-3 head for a target (Li et al. 2025, arXiv:2503.01840)."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from driftguard_engine.models.directory import weight_files
from driftguard_engine.models.eagle3_head import ALGORITHM, Eagle3Head, HeadConfig
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from driftguard_training.acceptance import distillation_loss
from driftguard_training.model_directories import save_files
from driftguard_training.settings import Loss

PASSES = 3  # drafts of a chain that a head is trained for


def new_head(
    target: PreTrainedModel, features: tuple[int, ...], token_ids: Tensor, layer: LlamaConfig
) -> Eagle3Head:
    """A head that reads these layers of the target and drafts these of its tokens, [D] ascending. It shares
    the target's embedding, and begins with its output layer."""
    hidden: int = target.config.hidden_size
    head = Eagle3Head(HeadConfig(layer, len(token_ids), features), hidden, embeds=False)
    output = cast("Any", target).get_output_embeddings()
    head.lm_head.weight.data.copy_(output.weight.detach()[token_ids])
    return head


def head_loss(
    head: Eagle3Head, target: PreTrainedModel, token_ids: Tensor, tokens: Tensor, passes: int, loss: Loss
) -> tuple[Tensor, list[float]]:
    """The mean loss of a chain of so many drafts from every place of tokens [R, L], and the mean acceptance
    probability of each draft of the chain."""
    with torch.no_grad():
        told = target(input_ids=tokens, output_hidden_states=True)
        p = torch.softmax(told.logits, -1)[..., token_ids]  # [R, L, D]
        features = torch.cat([told.hidden_states[layer] for layer in head.config.features], -1)
        embedded = cast("Any", target).get_input_embeddings()(tokens)  # [R, L, hidden]
    counted = torch.ones(tokens.shape[0], tokens.shape[1] + 1, dtype=torch.bool)
    total, accepted = chain_loss(p, counted, chains(head, features, embedded, passes), loss)
    return total, [each.mean().item() for each in accepted]


def chain_loss(
    p: Tensor, counted: Tensor, chained: Iterable[Tensor], loss: Loss
) -> tuple[Tensor, list[Tensor]]:
    """The mean loss of the passes of `chains` (scalar), and the acceptance probability of each draft of each
    pass.

    p [R, L, D]: the target's probabilities of the head's tokens; what the target gives to others lowers
    acceptance, since they are never drafted. counted [R, L + 1]: the tokens at which a chain may begin and
    that are drafted, of which there must be one; the last is the one behind the sequences.
    """
    losses, accepted = [], []
    for step, logits in enumerate(chained):
        ahead = p[:, 1 + step :]  # place i drafts token i + 2 + step, which the target predicts one before
        drafted = counted[:, 2 : 2 + ahead.shape[1]] & counted[:, 2 + step :]
        if drafted.any():
            each, acceptance = distillation_loss(ahead[drafted], logits[:, : ahead.shape[1]][drafted], loss)
            losses.append(each)
            accepted.append(acceptance)
    return torch.stack(losses).mean(), accepted


def chains(head: Eagle3Head, features: Tensor, embedded: Tensor, passes: int) -> Iterator[Tensor]:
    """Logits [R, L - 1, D] of each pass of the chains that begin at every place of R sequences, with the
    sequences' own tokens (training-time test).

    features [R, L, F]: of the target. embedded [R, L, hidden]. passes: L - 1 at most. In pass s the chain of
    place i is at place i + s: it sees the places up to i as the first pass left them, and its own of the
    passes since. The last s logits of pass s are of no token of the sequence.
    """
    layer: Any = head.layers[0]
    attention, config = layer.self_attn, head.config
    rows, places = features.shape[0], features.shape[1] - 1
    hidden = _fused(head, features[:, :-1])
    causal = torch.full((places, places), -torch.inf).triu(1)
    group = attention.q_proj.out_features // attention.k_proj.out_features
    keys: list[Tensor] = []
    values: list[Tensor] = []
    for step in range(passes):
        behind = torch.nn.functional.pad(embedded[:, 1 + step :], (0, 0, 0, step))
        normed = layer.hidden_norm(hidden)
        read = torch.cat([layer.input_layernorm(behind), normed], -1)
        query, key, value = (
            each(read).view(rows, places, -1, attention.head_dim)
            for each in (attention.q_proj, attention.k_proj, attention.v_proj)
        )  # [R, L - 1, heads, D]
        if config.layer.model_type == "qwen3":
            query, key = attention.q_norm(query), attention.k_norm(key)
        query, key, value = (each.transpose(1, 2) for each in (query, key, value))
        cos, sin = head.rotary_emb(hidden, torch.arange(step, step + places)[None])
        query, key = apply_rotary_pos_emb(query, key, cos, sin)
        keys.append(key.repeat_interleave(group, 1))
        values.append(value.repeat_interleave(group, 1))
        query = query * attention.scaling
        own = [(query * each).sum(-1, keepdim=True) for each in keys[1:]]
        weights = torch.cat([query @ keys[0].transpose(-1, -2) + causal, *own], -1).softmax(-1)
        mixed = weights[..., :places] @ values[0]
        for place, each in enumerate(values[1:], places):
            mixed = mixed + weights[..., place, None] * each
        hidden = normed if config.norm_before_residual else hidden
        hidden = hidden + attention.o_proj(mixed.transpose(1, 2).flatten(2))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        normed = head.norm(hidden)
        yield head.lm_head(normed)
        hidden = normed if config.norm_output else hidden


def _fused(head: Eagle3Head, features: Tensor) -> Tensor:
    if head.input_norm is not None:
        features = head.input_norm(features)
    if head.fc_norm is not None:
        parts = features.chunk(len(head.fc_norm), -1)
        features = torch.cat([norm(part) for norm, part in zip(head.fc_norm, parts, strict=True)], -1)
    fused: Tensor = head.fc(features)
    return fused


def frequent_tokens(streams: Sequence[Tensor], count: int, vocabulary: int) -> Tensor:
    """The `count` most frequent ids of the streams, ascending, [count]."""
    counts = torch.stack([stream.bincount(minlength=vocabulary) for stream in streams]).sum(0)
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def save_head(
    output: Path, head: Eagle3Head, token_ids: Tensor, dtype: torch.dtype, provenance: Mapping[str, object]
) -> str:
    """Write a directory in the layout of speculators, atomically; returns its version."""
    config, vocabulary = head.config, head.config.layer.vocab_size
    weights = {name: each.detach().to(dtype).contiguous() for name, each in head.state_dict().items()}
    if len(token_ids) < vocabulary:
        weights["d2t"] = token_ids - torch.arange(len(token_ids))
        weights["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, token_ids, True)
    told = {
        "speculators_model_type": ALGORITHM,
        "architectures": ["Eagle3DraftModel"],
        "draft_vocab_size": len(token_ids),
        "eagle_aux_hidden_state_layer_ids": list(config.features),
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
        "dtype": str(dtype).removeprefix("torch."),
        "transformer_layer_config": config.layer.to_diff_dict(),
    }

    def write(directory: Path) -> None:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")

    return save_files(output, write, provenance)


def save_trained_head(output: Path, parent: Path, head: Eagle3Head, provenance: Mapping[str, object]) -> str:
    """As `save_head`, a head that was read from the directory `parent`: whatever else is in its files stays
    as it is, in the same types."""
    weights = {name: each for path in weight_files(parent) for name, each in load_file(path).items()}
    for name, trained in head.state_dict().items():
        weights[name] = trained.detach().to(weights[name].dtype).contiguous()

    def write(directory: Path) -> None:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        shutil.copyfile(parent / "config.json", directory / "config.json")

    return save_files(output, write, provenance)
