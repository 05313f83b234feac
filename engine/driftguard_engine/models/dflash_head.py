"""The weights of a DFlash or DSpark head, from a directory in the layout of speculators.

    config.json    speculators_model_type "dflash" or "dspark", transformer_layer_config (of Qwen3),
                   draft_vocab_size, aux_hidden_state_layer_ids, block_size, mask_token_id,
                   sample_from_anchor; of DSpark markov_rank, markov_head_type
    *.safetensors  fc; hidden_norm; layers; norm; lm_head; embed_tokens where they are not the target's; d2t
                   and t2d where the vocabulary is a part of the target's; of DSpark markov_head

The confidence head of DSpark is not read: it tells how likely a token is accepted that was drawn before, and
a chain must not be cut by that (see `Drafter`).

(github.com/vllm-project/speculators, August 2026: models.dflash and models.dspark)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from driftguard_engine.models.speculators import LAYERS, MAPS, HeadDirectory, TargetSizes, head_kind

_NOT_READ = ("confidence_head.proj.weight", "confidence_head.proj.bias")
_MARKOV_HEADS = ("vanilla", "gated", "rnn")


@dataclass(frozen=True, slots=True)
class BlockConfig:
    """layer: of transformers. features: layers of the target that are read. block: places of a block, the
    newest token's first. drafts_at_first: whether the newest token's place drafts too. markov_rank: 0: each
    place drafts by itself."""

    layer: Any
    draft_vocabulary: int
    features: tuple[int, ...]
    block: int
    mask_token_id: int
    drafts_at_first: bool
    markov_rank: int = 0
    markov_kind: str = "vanilla"


class MarkovHead(nn.Module):
    """Named as in the checkpoint: what is added to the logits of a place, by the token before it."""

    def __init__(self, config: BlockConfig) -> None:
        super().__init__()
        rank, hidden = config.markov_rank, config.layer.hidden_size
        self.kind = config.markov_kind
        self.markov_w1 = nn.Embedding(config.layer.vocab_size, rank)
        self.markov_w2 = nn.Linear(rank, config.draft_vocabulary, bias=False)
        if self.kind == "gated":
            self.gate_proj = nn.Linear(hidden + rank, rank)
        if self.kind == "rnn":
            self.joint_proj = nn.Linear(2 * rank + hidden, 3 * rank)

    def forward(self, before: Tensor, hidden: Tensor, state: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """[..., D], and the state for the next place. before [...]: tokens; hidden [..., H]: what the output
        layer reads; state: None at the first place of a block."""
        embedded = self.markov_w1(before)
        if self.kind == "gated":
            embedded = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], -1))) * embedded
        if self.kind == "rnn":
            state = torch.zeros_like(embedded) if state is None else state
            read = self.joint_proj(torch.cat([state, embedded, hidden], -1))
            gate, candidate, output = read.chunk(3, -1)
            gate = torch.sigmoid(gate)
            state, embedded = gate * state + (1 - gate) * torch.tanh(candidate), torch.tanh(output)
        return self.markov_w2(embedded), state


class BlockHead(nn.Module):
    """Named as in the checkpoint. Without embed_tokens, where the target's are used."""

    def __init__(self, config: BlockConfig, target_hidden: int, *, embeds: bool) -> None:
        super().__init__()
        layer = config.layer
        decoder_layer, norm, rotary = LAYERS["qwen3"]
        hidden, epsilon = layer.hidden_size, layer.rms_norm_eps
        self.config = config
        self.embed_tokens = nn.Embedding(layer.vocab_size, hidden) if embeds else None
        self.fc = nn.Linear(len(config.features) * target_hidden, hidden, bias=False)
        self.hidden_norm = norm(hidden, epsilon)
        self.layers = nn.ModuleList(decoder_layer(layer, index) for index in range(layer.num_hidden_layers))
        self.norm = norm(hidden, epsilon)
        self.lm_head = nn.Linear(hidden, config.draft_vocabulary, bias=False)
        self.markov_head = MarkovHead(config) if config.markov_rank else None
        self.rotary_emb = rotary(layer)


def read_block_head(directory: Path, target: TargetSizes, *, field: str) -> tuple[BlockHead, Tensor]:
    """The head, in the target's type and on its device, and the target's id of each id that it drafts, [D].

    Raises InvalidModel: what does not fit, by its name.
    """
    source = HeadDirectory(directory, field)
    config = _block_config(source, target.layers)
    tensors = source.tensors(target)
    embeds = source.embeds(tensors, target)
    with torch.device("meta"):
        head = BlockHead(config, target.hidden, embeds=embeds)
    head = source.filled(head, tensors, target, *MAPS, *_NOT_READ)
    return head, source.target_ids(tensors, config.draft_vocabulary, target.vocabulary)


def _block_config(source: HeadDirectory, target_layers: int) -> BlockConfig:
    layer, told, markov = source.layer_config(), source.config, head_kind(source.path) == "dspark"
    if layer.model_type != "qwen3":
        raise source.refused(
            f"transformer_layer_config.model_type: {layer.model_type!r}, only layers of qwen3 are computed"
        )
    at_first, rank, kind = bool(told.get("sample_from_anchor", markov)), 0, "vanilla"
    if markov:
        rank, kind = source.whole("markov_rank", 0, layer.vocab_size), told.get("markov_head_type", kind)
        if kind not in _MARKOV_HEADS:
            raise source.refused(f"markov_head_type: {kind!r} is not one of {', '.join(_MARKOV_HEADS)}")
    return BlockConfig(
        layer,
        source.whole("draft_vocab_size", 1, layer.vocab_size),
        source.features("aux_hidden_state_layer_ids", target_layers),
        source.whole("block_size", 1 if at_first else 2, layer.max_position_embeddings),
        source.whole("mask_token_id", 0, layer.vocab_size - 1),
        at_first,
        rank,
        kind,
    )
