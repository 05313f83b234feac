"""The weights of an EAGLE-3 head, from a directory in the layout of speculators.

    config.json    speculators_model_type "eagle3", transformer_layer_config, draft_vocab_size,
                   eagle_aux_hidden_state_layer_ids; norm_before_residual, norm_before_fc, fc_norm,
                   norm_output
    *.safetensors  fc; layers.0: input_layernorm, hidden_norm, self_attn, post_attention_layernorm, mlp; norm;
                   lm_head; input_norm or fc_norm where config.json says so; embed_tokens where they are not
                   the target's; d2t and t2d where the vocabulary is a part of the target's

(github.com/vllm-project/speculators, August 2026: models.eagle3.core and config, train.vocab_mapping)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.models.llama import modeling_llama as llama
from transformers.models.qwen3 import modeling_qwen3 as qwen3

from driftguard_engine.core import InvalidModel
from driftguard_engine.models.directory import weight_files
from driftguard_engine.models.llama_weights import supports
from driftguard_engine.models.plausible import check_parameters

ALGORITHM: Final = "eagle3"
_MAPS: Final[tuple[str, ...]] = ("d2t", "t2d")
_NOT_READ: Final = ("verifier_norm.weight", "verifier_lm_head.weight")  # of the target, for training
_LAYERS: Final[Mapping[str, Any]] = {
    "llama": (llama.LlamaDecoderLayer, llama.LlamaRMSNorm, llama.LlamaRotaryEmbedding),
    "qwen3": (qwen3.Qwen3DecoderLayer, qwen3.Qwen3RMSNorm, qwen3.Qwen3RotaryEmbedding),
}


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """layer: of transformers. features: layers of the target that are read. norms: what is normalised: the
    features together before fc, each of them, the residual too, and what a pass gives to the next one."""

    layer: Any
    draft_vocabulary: int
    features: tuple[int, ...]
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False


class Eagle3Head(nn.Module):
    """Named as in the checkpoint. Without embed_tokens, where the target's are used."""

    def __init__(self, config: HeadConfig, target_hidden: int, *, embeds: bool) -> None:
        super().__init__()
        layer, sources = config.layer, len(config.features)
        decoder_layer, norm, rotary = _LAYERS[layer.model_type]
        hidden, epsilon = layer.hidden_size, layer.rms_norm_eps
        self.config = config
        self.embed_tokens = nn.Embedding(layer.vocab_size, hidden) if embeds else None
        self.input_norm = norm(sources * target_hidden, epsilon) if config.norm_before_fc else None
        self.fc_norm = None
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(norm(target_hidden, epsilon) for _ in range(sources))
        self.fc = nn.Linear(sources * target_hidden, hidden, bias=False)
        first = decoder_layer(layer, 0)
        first.hidden_norm = norm(hidden, epsilon)
        for name in ("q_proj", "k_proj", "v_proj"):
            narrow = getattr(first.self_attn, name)
            wide = nn.Linear(2 * hidden, narrow.out_features, bias=narrow.bias is not None)
            setattr(first.self_attn, name, wide)
        self.layers = nn.ModuleList([first])
        self.norm = norm(hidden, epsilon)
        self.lm_head = nn.Linear(hidden, config.draft_vocabulary, bias=False)
        self.rotary_emb = rotary(layer)


def is_eagle3(directory: Path) -> bool:
    """False too where config.json cannot be read."""
    try:
        return bool(_read_config(directory).get("speculators_model_type") == ALGORITHM)
    except (OSError, ValueError, AttributeError):
        return False


def layer_config(directory: Path, *, field: str) -> Any:
    """The configuration of the head's decoder layer, of transformers. Raises InvalidModel."""
    try:
        told = dict(_read_config(directory)["transformer_layer_config"])
        config = AutoConfig.for_model(told.pop("model_type"), **told)
    except Exception as error:  # files of any content, and errors of many types
        raise _refused(f"transformer_layer_config cannot be used ({error!r})", directory, field) from error
    if config.model_type not in _LAYERS or not supports(config, config.max_position_embeddings):
        raise _refused(
            f"transformer_layer_config: a layer of {config.model_type!r} with these settings is not computed",
            directory,
            field,
        )
    if config.num_hidden_layers != 1:
        raise _refused(
            f"transformer_layer_config.num_hidden_layers: {config.num_hidden_layers}, only 1 is computed",
            directory,
            field,
        )
    return config


def read_head(
    directory: Path, target_layers: int, target_embedding: Tensor, vocabulary: int, *, field: str
) -> tuple[Eagle3Head, Tensor]:
    """The head, in the target's type and on its device, and the target's id of each id that it drafts, [D].

    target_embedding [V or more, hidden]. vocabulary: V. Raises InvalidModel: what does not fit, by its name.
    """
    config = _head_config(directory, target_layers, field)
    if config.layer.vocab_size != vocabulary:
        raise _refused(
            f"transformer_layer_config.vocab_size: {config.layer.vocab_size}, the target's is {vocabulary}",
            directory,
            field,
        )
    try:
        tensors = {name: each for path in weight_files(directory) for name, each in load_file(path).items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise _refused(f"the weights cannot be read ({error})", directory, field) from None
    maps = {name: tensors.pop(name) for name in _MAPS if name in tensors}
    hidden = target_embedding.shape[1]
    with torch.device("meta"):
        head = Eagle3Head(config, hidden, embeds="embed_tokens.weight" in tensors)
    if head.embed_tokens is None and config.layer.hidden_size != hidden:
        raise _refused(
            f"embed_tokens.weight is missing, and the target's is of size {hidden}, not "
            f"{config.layer.hidden_size}",
            directory,
            field,
        )
    wanted = {name: each.shape for name, each in head.state_dict().items()}
    for name, shape in wanted.items():
        if name not in tensors:
            raise _refused(f"{name} is missing", directory, field)
        if tensors[name].shape != shape:
            raise _refused(
                f"{name} is {[*tensors[name].shape]}, needed is {[*shape]} for a target of hidden size "
                f"{hidden}",
                directory,
                field,
            )
    if unknown := sorted(tensors.keys() - wanted.keys() - set(_NOT_READ)):
        raise _refused(f"{unknown[0]} is no part of an EAGLE-3 head", directory, field)
    head.load_state_dict({name: tensors[name] for name in wanted}, assign=True)
    head = head.to(dtype=target_embedding.dtype).requires_grad_(False)
    head.rotary_emb = type(head.rotary_emb)(config.layer)  # in no file, and in float32 whatever serves
    head = head.to(target_embedding.device)
    check_parameters(head, directory, field=field)
    return head, _target_ids(maps, config.draft_vocabulary, vocabulary, directory, field)


def _head_config(directory: Path, target_layers: int, field: str) -> HeadConfig:
    layer, told = layer_config(directory, field=field), _read_config(directory)
    features = told.get("eagle_aux_hidden_state_layer_ids")
    if features is None:  # as speculators and vLLM
        features = [2, target_layers // 2, target_layers - 3]
    if not (isinstance(features, list) and features):
        raise _refused(
            f"eagle_aux_hidden_state_layer_ids: {features!r} is no list of layers", directory, field
        )
    for each in features:
        if not (isinstance(each, int) and 0 <= each < target_layers):
            raise _refused(
                f"eagle_aux_hidden_state_layer_ids: {each!r} is not between 0 and {target_layers - 1}, the "
                "last layer of the target",
                directory,
                field,
            )
    size = told.get("draft_vocab_size")
    if not (isinstance(size, int) and 0 < size <= layer.vocab_size):
        raise _refused(
            f"draft_vocab_size: {size!r} is not between 1 and {layer.vocab_size}", directory, field
        )
    norms = ("norm_before_fc", "fc_norm", "norm_before_residual", "norm_output")
    return HeadConfig(layer, size, tuple(features), **{name: bool(told.get(name)) for name in norms})


def _target_ids(
    maps: Mapping[str, Tensor], size: int, vocabulary: int, directory: Path, field: str
) -> Tensor:
    """d2t [D]: what an id of the head is below the target's; t2d [V]: whether the head has this token."""
    if "d2t" not in maps:
        if size != vocabulary:
            raise _refused(
                f"d2t is missing, and draft_vocab_size is {size}, not the target's {vocabulary}",
                directory,
                field,
            )
        return torch.arange(size)
    if maps["d2t"].shape != (size,):
        raise _refused(f"d2t is {[*maps['d2t'].shape]}, draft_vocab_size is {size}", directory, field)
    ids = torch.arange(size) + maps["d2t"].long()
    wrong = ((ids < 0) | (ids >= vocabulary)).nonzero().flatten()
    if len(wrong):
        first = int(wrong[0])
        raise _refused(
            f"d2t maps id {first} to {int(ids[first])}, beyond the target's 0 to {vocabulary - 1}",
            directory,
            field,
        )
    if len(torch.unique(ids)) < size:
        raise _refused("d2t maps two ids to one token", directory, field)
    if "t2d" in maps and not torch.equal(maps["t2d"].nonzero().flatten(), ids.sort().values):
        raise _refused("t2d names other tokens than d2t", directory, field)
    return ids


def _read_config(directory: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return found


def _refused(what: str, directory: Path, field: str) -> InvalidModel:
    return InvalidModel(f"{field}: the EAGLE-3 head in {directory} cannot serve: {what}", field=field)
