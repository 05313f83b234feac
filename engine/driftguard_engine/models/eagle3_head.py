"""The weights of an EAGLE-3 or P-EAGLE head, from a directory in the layout of speculators.

    config.json    speculators_model_type "eagle3" or "peagle", transformer_layer_config, draft_vocab_size,
                   eagle_aux_hidden_state_layer_ids; norm_before_residual, norm_before_fc, fc_norm,
                   norm_output; of P-EAGLE mask_token_id
    *.safetensors  fc; layers.0: input_layernorm, hidden_norm, self_attn, post_attention_layernorm, mlp;
                   layers.1 and so on as the target's own layers; norm; input_norm or fc_norm where
                   config.json says so; embed_tokens and lm_head where they are not the target's; d2t and t2d
                   where the vocabulary is a part of the target's; of P-EAGLE mask_hidden

(github.com/vllm-project/speculators, August 2026: models.eagle3 and models.peagle. That the target's lm_head
stands for a missing one is as in vLLM: model_executor.models.utils.process_eagle_weight)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn

from driftguard_engine.models.speculators import LAYERS, MAPS, HeadDirectory, TargetSizes, head_kind


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """layer: of transformers. features: layers of the target that are read. norms: what is normalised: the
    features together before fc, each of them, the residual too, and what a pass gives to the next one.
    mask_token_id: of P-EAGLE, what stands for a token that is not known yet."""

    layer: Any
    draft_vocabulary: int
    features: tuple[int, ...]
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    mask_token_id: int | None = None


class Eagle3Head(nn.Module):
    """Named as in the checkpoint. embed_tokens and lm_head are None where the target's are used."""

    def __init__(
        self, config: HeadConfig, target_hidden: int, *, embeds: bool, unembeds: bool = True
    ) -> None:
        super().__init__()
        layer, sources = config.layer, len(config.features)
        decoder_layer, norm, rotary = LAYERS[layer.model_type]
        hidden, epsilon = layer.hidden_size, layer.rms_norm_eps
        self.config = config
        self.embed_tokens = nn.Embedding(layer.vocab_size, hidden) if embeds else None
        self.input_norm = norm(sources * target_hidden, epsilon) if config.norm_before_fc else None
        self.fc_norm = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(norm(target_hidden, epsilon) for _ in range(sources))
        self.fc = nn.Linear(sources * target_hidden, hidden, bias=False)
        self.layers = nn.ModuleList(decoder_layer(layer, index) for index in range(layer.num_hidden_layers))
        first = cast("Any", self.layers[0])
        first.hidden_norm = norm(hidden, epsilon)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(first.self_attn, name)
            wide = nn.Linear(2 * hidden, narrow.out_features, bias=narrow.bias is not None)
            setattr(first.self_attn, name, wide)
        self.norm = norm(hidden, epsilon)
        self.lm_head = nn.Linear(hidden, config.draft_vocabulary, bias=False) if unembeds else None
        self.mask_hidden = None
        if config.mask_token_id is not None:
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, sources * target_hidden))
        self.rotary_emb = rotary(layer)

    def fused(self, features: Tensor) -> Tensor:
        """What is kept of features [..., F]: [..., hidden]."""
        if self.input_norm is not None:
            features = self.input_norm(features)
        if self.fc_norm is not None:
            parts = features.chunk(len(self.fc_norm), -1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        found: Tensor = self.fc(features)
        return found

    def entered(self, embedded: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Of embeddings and fused vectors [..., hidden]: what the first layer's attention reads, and what its
        output is added to."""
        first: Any = self.layers[0]
        normed = first.hidden_norm(hidden)
        read = torch.cat([first.input_layernorm(embedded), normed], -1)
        return read, normed if self.config.norm_before_residual else hidden

    def left(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Of the last layer's outputs: what the output layer reads, and what the next pass reads in place of
        the fused vectors."""
        normed = self.norm(hidden)
        return normed, normed if self.config.norm_output else hidden


def read_head(directory: Path, target: TargetSizes, *, field: str) -> tuple[Eagle3Head, Tensor]:
    """The head, in the target's type and on its device, and the target's id of each id that it drafts, [D].

    Raises InvalidModel: what does not fit, by its name.
    """
    source = HeadDirectory(directory, field)
    config = _head_config(source, target.layers)
    tensors = source.tensors(target)
    token_ids = source.target_ids(tensors, config.draft_vocabulary, target.vocabulary)
    embeds, unembeds = source.embeds(tensors, target), source.unembeds(tensors, target, token_ids)
    with torch.device("meta"):
        head = Eagle3Head(config, target.hidden, embeds=embeds, unembeds=unembeds)
    return source.filled(head, tensors, target, *MAPS), token_ids


def _head_config(source: HeadDirectory, target_layers: int) -> HeadConfig:
    layer, mask = source.layer_config(), None
    features = source.features("eagle_aux_hidden_state_layer_ids", target_layers)
    size = source.whole("draft_vocab_size", 1, layer.vocab_size)
    if head_kind(source.path) == "peagle":
        mask = source.whole("mask_token_id", 0, layer.vocab_size - 1)
    norms = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
    told = {name: bool(source.config.get(name)) for name in norms}
    return HeadConfig(layer, size, features, mask_token_id=mask, **told)
