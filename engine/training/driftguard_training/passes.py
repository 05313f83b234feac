"""What a head gives for every place of whole sequences, as it is trained: logits of each draft of a step.

In pass s the step of place i drafts token i + 2 + s: it has the target's features up to place i, and token
i + 1 is its newest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from driftguard_engine.models.dflash_head import BlockHead
from driftguard_engine.models.eagle3_head import Eagle3Head
from driftguard_engine.models.fused_head import FusedHead
from torch import Tensor
from torch.nn import functional
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

ChainHead = Eagle3Head | FusedHead


def chains(
    head: ChainHead,
    features: Tensor,
    embedding: Tensor,
    tokens: Tensor,
    passes: int,
    unembed: Callable[[Tensor], Tensor],
) -> Iterator[Tensor]:
    """Logits [R, L - 1, D] of each pass of the chains that begin at every place of R sequences, with the
    sequences' own tokens (training-time test), or with the masks of P-EAGLE.

    features [R, L, F]: of the target. embedding [V, hidden]. tokens [R, L]. passes: L - 1 at most.
    unembed: the target's output layer, for a head that has none. In pass s the chain of place i is at place
    i + s: it sees the places up to i as the first pass left them, and its own of the passes since. The last s
    logits of pass s are of no token of the sequence.
    """
    rows, places = features.shape[0], features.shape[1] - 1
    layers: list[Any] = [head.parts.layer] if isinstance(head, FusedHead) else [*head.layers]
    seen: list[list[tuple[Tensor, Tensor]]] = [[] for _ in layers]
    hidden = head.fused(features[:, :-1])
    output = (head.lm_head if isinstance(head, Eagle3Head) else None) or unembed
    for step in range(passes):
        behind = functional.pad(tokens[:, 1 + step :], (0, step))
        if step and isinstance(head, Eagle3Head) and head.mask_hidden is not None:
            behind = torch.full_like(behind, cast("int", head.config.mask_token_id))
            hidden = head.fused(head.mask_hidden).expand(rows, places, -1)
        read, hidden = head.entered(functional.embedding(behind, embedding), hidden)
        rotation = head.rotary_emb(hidden, torch.arange(step, step + places)[None])
        for index, (layer, before) in enumerate(zip(layers, seen, strict=True)):
            if index:
                read = layer.input_layernorm(hidden)
            hidden = hidden + _attended(layer.self_attn, read, before, rotation)
            hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        normed, hidden = head.left(hidden)
        yield output(normed)


def _attended(
    attention: Any, read: Tensor, seen: list[tuple[Tensor, Tensor]], rotation: tuple[Tensor, Tensor]
) -> Tensor:
    """[R, L, hidden]. seen: keys and values [R, heads, L, D] of the passes before, to which this one's are
    added."""
    places = read.shape[1]
    query, key, value = (_projected(attention, name, read).transpose(1, 2) for name in "qkv")
    query, key = apply_rotary_pos_emb(query, key, *rotation)
    group = query.shape[1] // key.shape[1]
    seen.append((key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)))
    query = query * attention.scaling
    causal = torch.full((places, places), -torch.inf).triu(1)
    own = [(query * keys).sum(-1, keepdim=True) for keys, _ in seen[1:]]
    weights = torch.cat([query @ seen[0][0].transpose(-1, -2) + causal, *own], -1).softmax(-1)
    mixed = weights[..., :places] @ seen[0][1]
    for place, (_, values) in enumerate(seen[1:], places):
        mixed = mixed + weights[..., place, None] * values
    found: Tensor = attention.o_proj(mixed.transpose(1, 2).flatten(2))
    return found


def blocks(
    head: BlockHead, features: Tensor, embedding: Tensor, tokens: Tensor, passes: int
) -> Iterator[Tensor]:
    """As `chains`, of blocks that begin behind every place. passes: as many as a block drafts, or fewer."""
    config, places = head.config, features.shape[1] - 1
    context = head.hidden_norm(head.fc(features[:, :-1]))  # [R, P, hidden]
    token_ids = functional.pad(tokens[:, 1:, None], (0, config.block - 1), value=config.mask_token_id)
    hidden = functional.embedding(token_ids, embedding)  # [R, P, block, hidden]
    within = torch.arange(config.block) + torch.arange(1, places + 1)[:, None]  # [P, block]
    known = torch.arange(places)[None]
    rotations = head.rotary_emb(context, known), head.rotary_emb(context, within.view(1, -1))
    hidden_before = torch.full((places, 1, places), -torch.inf).triu(1)
    hidden_before = hidden_before.masked_fill(known <= torch.arange(places)[:, None, None], 0)
    for layer in cast("Any", head.layers):
        attention, read = layer.self_attn, layer.input_layernorm(hidden).flatten(1, 2)
        query, key, value = (_projected(attention, name, read).transpose(1, 2) for name in "qkv")
        query, key = apply_rotary_pos_emb(query, key, *rotations[1])
        old_key, old_value = (_projected(attention, name, context).transpose(1, 2) for name in "kv")
        old_key, _ = apply_rotary_pos_emb(old_key, old_key, *rotations[0])
        group = query.shape[1] // key.shape[1]
        key, value, old_key, old_value = (
            each.repeat_interleave(group, 1) for each in (key, value, old_key, old_value)
        )
        query, key, value = (
            each.unflatten(2, (places, config.block)) for each in (query * attention.scaling, key, value)
        )  # [R, heads, P, block, D]
        scores = [
            query @ old_key[:, :, None].transpose(-1, -2) + hidden_before,
            query @ key.transpose(-1, -2),
        ]
        weights = torch.cat(scores, -1).softmax(-1)
        mixed = weights[..., :places] @ old_value[:, :, None] + weights[..., places:] @ value
        hidden = hidden + attention.o_proj(mixed.permute(0, 2, 3, 1, 4).flatten(3))
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    normed, state = head.norm(hidden), None
    skipped = int(not config.drafts_at_first)
    for place in range(passes + skipped):
        step = max(place - skipped, 0)
        logits = head.lm_head(normed[:, :, place])
        if head.markov_head is not None:
            before = functional.pad(tokens[:, 1 + step :], (0, step))
            bias, state = head.markov_head(before, normed[:, :, place], state)
            logits = logits + bias
        if place >= skipped:
            yield logits


def _projected(attention: Any, name: str, read: Tensor) -> Tensor:
    """[R, L, heads, D] of read [R, L, in]. name: q, k or v."""
    found: Tensor = getattr(attention, f"{name}_proj")(read).unflatten(-1, (-1, attention.head_dim))
    norm = getattr(attention, f"{name}_norm", None)
    return found if norm is None else norm(found)
