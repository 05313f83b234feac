"""Small targets whose checkpoints hold a layer for multi-token prediction, and what transformers' own module
for such layers predicts from the same files, computed anew for a whole sequence in float64."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.modeling_layers import MtpModel

from tests.engine.core.eagle3_heads import Reference, disturbed
from tests.engine.core.tiny import save

_USUAL = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
}
_EXPERTS = {"n_routed_experts": 4, "n_shared_experts": 1, "n_group": 1, "topk_group": 1}
_LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
_SHARED_EXPERT = {"num_experts": 4, "shared_expert_intermediate_size": 16}
SHAPES: dict[str, dict[str, Any]] = {
    "deepseek_v3": _USUAL | _EXPERTS | _LATENT | {"n_group": 2, "first_k_dense_replace": 1},
    "glm4_moe": _USUAL | _EXPERTS | {"first_k_dense_replace": 1},
    "glm4_moe_lite": _USUAL | _EXPERTS | _LATENT,
    "qwen3_next": _USUAL | _SHARED_EXPERT | _DELTA_NET,
    "qwen3_5_text": _USUAL | _DELTA_NET,
    "qwen3_5_moe_text": _USUAL | _SHARED_EXPERT | _DELTA_NET,
}


def config_of(directory: Path) -> Any:
    """With what transformers' module for such layers asks for, and Qwen's do not tell."""
    config = AutoConfig.from_pretrained(directory)
    config.num_mtp_layers = 1
    config.mtp_layer_types, config.mtp_mlp_layer_types = ["full_attention"], ["sparse"]
    return config


def main_and_mtp(directory: Path) -> tuple[Any, Any]:
    """The target in a directory and its layer, by transformers alone, in float64."""
    config = config_of(directory)
    main: Any = AutoModelForCausalLM.from_pretrained(
        directory, config=config, dtype=torch.float64, experts_implementation="eager"
    )
    main._keys_to_ignore_on_load_unexpected = [rf"^model\.layers\.{config.num_hidden_layers}\.", r"^mtp\."]
    return main, MtpModel.from_pretrained(main)


def add_layer(directory: Path, *, copies: bool = True, shards: bool = False) -> None:
    """Adds a random layer to a target's checkpoint, named as in published ones. copies: of the embedding and
    the output layer, too."""
    config = config_of(directory)
    main: Any = AutoModelForCausalLM.from_pretrained(directory, config=config, dtype=torch.float32)
    layer = disturbed(MtpModel(main, 1).layers[0])
    for name, buffer in layer.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.2, 0.2, len(buffer)))
    file = directory / "model.safetensors"
    with safe_open(file, "pt") as opened:
        whole = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 it is no dict
    qwen = config.model_type.startswith("qwen3")
    prefix = "mtp." if qwen else f"model.layers.{config.num_hidden_layers}."
    renamed = {
        "enorm": "pre_fc_norm_embedding",
        "hnorm": "pre_fc_norm_hidden",
        "eh_proj": "fc",
        "post_norm": "norm",
    }
    if not qwen:
        renamed = {"post_norm": "shared_head.norm"}
    added: dict[str, Tensor] = {}
    for name, each in layer.state_dict().items():
        first = name.split(".")[0]
        if first == "mtp_block":
            added |= split_experts(name.replace("mtp_block.", "layers.0." if qwen else ""), each)
        else:
            added[name.replace(first, renamed.get(first, first), 1)] = each
    if copies and not qwen:
        added |= {"embed_tokens.weight": whole["model.embed_tokens.weight"].clone()}
        added |= {"shared_head.head.weight": whole["lm_head.weight"].clone()}
    added = {prefix + name: each.contiguous() for name, each in added.items()}
    if not shards:
        save_file(whole | added, file, {"format": "pt"})
        return
    file.unlink()
    parts = {"model-1.safetensors": whole, "model-2.safetensors": added}
    for part, tensors in parts.items():
        save_file(tensors, directory / part, {"format": "pt"})
    index = {name: part for part, tensors in parts.items() for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def split_experts(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """As checkpoints have them: one by one."""
    found = re.fullmatch(r"(.*\.experts\.)(gate_up_proj|down_proj)", name)
    if found is None:
        return {name: tensor}
    kinds = ["gate_proj", "up_proj"] if found[2] == "gate_up_proj" else ["down_proj"]
    return {
        f"{found[1]}{index}.{kind}.weight": part.clone()
        for index, expert in enumerate(tensor)
        for kind, part in zip(kinds, expert.chunk(len(kinds)), strict=True)
    }


def save_with_mtp(
    directory: Path, kind: str, tokenizer: PreTrainedTokenizerFast | None = None, **changes: Any
) -> Path:
    save(directory, kind, seed=3, tokenizer=tokenizer, **SHAPES[kind])
    add_layer(directory, **changes)
    return directory


class OfTarget(Reference):
    """By `transformers.modeling_layers.MtpModel`, over the whole sequence and without a cache."""

    def __init__(self, directory: Path) -> None:
        self._main, self._mtp = main_and_mtp(directory)

    def logits(self, sequence: Sequence[int], drafts: Sequence[int]) -> Tensor:
        found: list[Tensor] = []
        with torch.inference_mode():
            told = self._main(torch.tensor([sequence]), output_hidden_states=True)
            hidden, behind = told.hidden_states[-1][:, :-1], [*sequence[1:]]
            for draft in drafts:
                positions = torch.arange(1, len(behind) + 1)[None]
                output = self._mtp.forward_layer(0, hidden, positions, None, input_ids=torch.tensor([behind]))
                found.append(self._mtp._project_to_logits(output[0, -1]))
                hidden, behind = torch.cat([hidden, output[:, -1:]], 1), [*behind, draft]
        return torch.stack(found).float()
