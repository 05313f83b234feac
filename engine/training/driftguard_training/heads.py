"""Training and saving a head for a target, of any kind that the engine drafts with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from driftguard_engine.models.dflash_head import BlockConfig, BlockHead
from driftguard_engine.models.directory import weight_files
from driftguard_engine.models.eagle3_head import Eagle3Head, HeadConfig
from driftguard_engine.models.fused_head import FusedHead, MtpHead
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel

from driftguard_training.acceptance import chain_loss
from driftguard_training.model_directories import save_files
from driftguard_training.passes import blocks, chains
from driftguard_training.settings import Loss

PASSES = 3  # drafts of a chain that a head is trained for
Head = Eagle3Head | FusedHead | BlockHead


def new_head(
    target: PreTrainedModel,
    features: tuple[int, ...],
    token_ids: Tensor,
    layer: LlamaConfig,
    mask_token_id: int | None = None,
) -> Eagle3Head:
    """A head that reads these layers of the target and drafts these of its tokens, [D] ascending. It shares
    the target's embedding. If these are all tokens it shares the output layer too and begins with the norm in
    front of it, else it begins with their part of that layer. mask_token_id: of P-EAGLE."""
    config = HeadConfig(layer, len(token_ids), features, mask_token_id=mask_token_id)
    unembeds = len(token_ids) < layer.vocab_size
    head = Eagle3Head(config, target.config.hidden_size, embeds=False, unembeds=unembeds)
    if head.lm_head is None:
        head.norm.weight.data.copy_(cast("Any", target).model.norm.weight)
    else:
        output = cast("Any", target).get_output_embeddings()
        head.lm_head.weight.data.copy_(output.weight.detach()[token_ids])
    return head


def head_loss(
    head: Head, target: PreTrainedModel, token_ids: Tensor, tokens: Tensor, passes: int, loss: Loss
) -> tuple[Tensor, list[float]]:
    """The mean loss of a step of so many drafts behind every place of tokens [R, L], and the mean acceptance
    probability of each draft of the step. It learns with the target's embedding, which stays as it is."""
    with torch.no_grad():
        told = target(input_ids=tokens, output_hidden_states=True)
        p = torch.softmax(told.logits, -1)[..., token_ids]  # [R, L, D]
        features = torch.cat([told.hidden_states[layer] for layer in features_of(head)], -1)
    embedding = cast("Any", target).get_input_embeddings().weight
    counted = torch.ones(tokens.shape[0], tokens.shape[1] + 1, dtype=torch.bool)
    passed = passes_of(head, target, features, embedding, tokens, passes)
    total, accepted = chain_loss(p, counted, passed, loss)
    return total, [each.mean().item() for each in accepted]


def passes_of(
    head: Head, target: PreTrainedModel, features: Tensor, embedding: Tensor, tokens: Tensor, passes: int
) -> Iterator[Tensor]:
    """`chains` or `blocks`."""
    if isinstance(head, BlockHead):
        return blocks(head, features, embedding, tokens, passes)
    return chains(head, features, embedding, tokens, passes, cast("Any", target).get_output_embeddings())


def features_of(head: Head) -> tuple[int, ...]:
    """Layers of the target that it reads."""
    return head.features if isinstance(head, FusedHead) else head.config.features


def frequent_tokens(streams: Sequence[Tensor], count: int, vocabulary: int) -> Tensor:
    """The `count` most frequent ids of the streams, ascending, [count]."""
    counts = torch.stack([stream.bincount(minlength=vocabulary) for stream in streams]).sum(0)
    return counts.argsort(descending=True, stable=True)[:count].sort().values


def save_head(
    output: Path, head: Head, token_ids: Tensor, dtype: torch.dtype, provenance: Mapping[str, object]
) -> str:
    """Write a directory in the layout of speculators, atomically; returns its version."""
    weights = {name: each.detach().to(dtype).contiguous() for name, each in head.state_dict().items()}
    if isinstance(head, FusedHead):
        layer, told = head.layer_config, _told_of_fused(head)
    else:
        layer = head.config.layer
        told = _told_of_eagle3(head.config) if isinstance(head, Eagle3Head) else _told_of_block(head.config)
        if len(token_ids) < layer.vocab_size:
            weights["d2t"] = token_ids - torch.arange(len(token_ids))
            weights["t2d"] = torch.zeros(layer.vocab_size, dtype=torch.bool).index_fill(0, token_ids, True)
    told |= {
        "dtype": str(dtype).removeprefix("torch."),
        "transformer_layer_config": layer.to_diff_dict(),
    }

    def write(directory: Path) -> None:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(told, indent=2) + "\n", encoding="utf-8")

    return save_files(output, write, provenance)


def _told_of_eagle3(config: HeadConfig) -> dict[str, Any]:
    parallel = config.mask_token_id is not None
    told = {
        "speculators_model_type": "peagle" if parallel else "eagle3",
        "architectures": ["PEagleDraftModel" if parallel else "Eagle3DraftModel"],
        "draft_vocab_size": config.draft_vocabulary,
        "eagle_aux_hidden_state_layer_ids": list(config.features),
        "norm_before_fc": config.norm_before_fc,
        "fc_norm": config.fc_norm,
        "norm_before_residual": config.norm_before_residual,
        "norm_output": config.norm_output,
    }
    return told | ({"mask_token_id": config.mask_token_id} if parallel else {})


def _told_of_block(config: BlockConfig) -> dict[str, Any]:
    markov = config.markov_rank > 0
    told = {
        "speculators_model_type": "dspark" if markov else "dflash",
        "architectures": ["DSparkDraftModel" if markov else "DFlashDraftModel"],
        "draft_vocab_size": config.draft_vocabulary,
        "aux_hidden_state_layer_ids": list(config.features),
        "block_size": config.block,
        "mask_token_id": config.mask_token_id,
        "sample_from_anchor": config.drafts_at_first,
    }
    kind = {"markov_rank": config.markov_rank, "markov_head_type": config.markov_kind}
    return told | (kind | {"enable_confidence_head": False} if markov else {})


def _told_of_fused(head: FusedHead) -> dict[str, Any]:
    if isinstance(head, MtpHead):
        return {
            "speculators_model_type": "mtp",
            "architectures": ["MTPDraftModel"],
            "num_nextn_predict_layers": 1,
        }
    norms, bias = head.parts.output_norm is not None, head.parts.fuse.bias is not None
    return {
        "speculators_model_type": "eagle",
        "architectures": ["EagleSpeculator"],
        "layernorms": norms,
        "fusion_bias": bias,
    }


def save_trained_head(output: Path, parent: Path, head: Head, provenance: Mapping[str, object]) -> str:
    """As `save_head`, a head that was read from the directory `parent`: whatever else is in its files stays
    as it is, in the same types."""
    weights = {name: each for path in weight_files(parent) for name, each in load_file(path).items()}
    for name, trained in head.state_dict().items():
        weights[name] = trained.detach().to(weights[name].dtype).contiguous()

    def write(directory: Path) -> None:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
        shutil.copyfile(parent / "config.json", directory / "config.json")

    return save_files(output, write, provenance)
