"""Heads in the layout of speculators: config.json with `speculators_model_type`, and safetensors.

What all kinds have in common: a decoder layer of Llama or Qwen3, layers of the target that they read, a
vocabulary that may be a part of the target's. What a kind has of its own is read by `eagle3_head`,
`fused_head` and `dflash_head`.

(github.com/vllm-project/speculators, August 2026: models, train.vocab_mapping)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

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
from driftguard_engine.models.plausible import check_parameters, fill

TITLES: Final[Mapping[str, str]] = {  # of kinds, which are also the names of methods
    "eagle3": "an EAGLE-3 head",
    "peagle": "a P-EAGLE head",
    "eagle": "an EAGLE head",
    "mtp": "an MTP head",
    "dflash": "a DFlash head",
    "dspark": "a DSpark head",
}
LAYERS: Final[Mapping[str, Any]] = {
    "llama": (llama.LlamaDecoderLayer, llama.LlamaRMSNorm, llama.LlamaRotaryEmbedding),
    "qwen3": (qwen3.Qwen3DecoderLayer, qwen3.Qwen3RMSNorm, qwen3.Qwen3RotaryEmbedding),
}
MAPS: Final = ("d2t", "t2d")
NOT_READ: Final = ("verifier_norm.weight", "verifier_lm_head.weight")  # of the target, for training


@dataclass(frozen=True, slots=True)
class TargetSizes:
    """What a head must fit. embedding [V or more, hidden]: its type and device are the head's."""

    vocabulary: int
    layers: int
    hidden: int
    embedding: Tensor


AnyHead = TypeVar("AnyHead", bound=nn.Module)


def head_kind(directory: Path) -> str | None:
    """One of TITLES; None: no head, also where config.json cannot be read. Raises InvalidModel: a head of
    another kind."""
    try:
        told = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        kind: str | None = told.get("speculators_model_type")
    except (OSError, ValueError, AttributeError):
        return None
    if kind is not None and kind not in TITLES:
        raise InvalidModel(
            f"draft: {directory} is a head of the speculators_model_type {kind!r}, of which only "
            f"{', '.join(TITLES)} are served",
            field="draft",
        )
    return kind


@dataclass(frozen=True, slots=True)
class HeadDirectory:
    """A directory with a head. field: which errors begin with."""

    path: Path
    field: str

    @property
    def config(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads((self.path / "config.json").read_text(encoding="utf-8"))
        return found

    @property
    def _title(self) -> str:
        return TITLES[self.config["speculators_model_type"]]

    def refused(self, what: str) -> InvalidModel:
        name = self._title.split(maxsplit=1)[1]
        return InvalidModel(f"{self.field}: the {name} in {self.path} cannot serve: {what}", field=self.field)

    def layer_config(self) -> Any:
        """The configuration of the head's decoder layers, of transformers. Raises InvalidModel."""
        try:
            told = dict(self.config["transformer_layer_config"])
            config = AutoConfig.for_model(told.pop("model_type"), **told)
        except Exception as error:  # files of any content, and errors of many types
            raise self.refused(f"transformer_layer_config cannot be used ({error!r})") from error
        if config.model_type not in LAYERS or not supports(config, config.max_position_embeddings):
            raise self.refused(
                f"transformer_layer_config: a layer of {config.model_type!r} with these settings is not "
                "computed"
            )
        if config.num_hidden_layers < 1:
            raise self.refused(f"transformer_layer_config.num_hidden_layers: {config.num_hidden_layers}")
        return config

    def features(self, name: str, target_layers: int) -> tuple[int, ...]:
        """The layers of the target that the setting of this name tells. Raises InvalidModel."""
        found = self.config.get(name)
        if found is None:  # as speculators and vLLM
            found = [2, target_layers // 2, target_layers - 3]
        if not (isinstance(found, list) and found):
            raise self.refused(f"{name}: {found!r} is no list of layers")
        for each in found:
            if not (isinstance(each, int) and 0 <= each < target_layers):
                raise self.refused(
                    f"{name}: {each!r} is not between 0 and {target_layers - 1}, the last layer of the target"
                )
        return tuple(found)

    def whole(self, name: str, least: int, most: int) -> int:
        """The setting of this name. Raises InvalidModel."""
        found = self.config.get(name)
        if not (isinstance(found, int) and least <= found <= most):
            raise self.refused(f"{name}: {found!r} is not between {least} and {most}")
        return found

    def tensors(self, target: TargetSizes) -> dict[str, Tensor]:
        """All tensors. Raises InvalidModel: they cannot be read, or the head is for another vocabulary."""
        size = self.layer_config().vocab_size
        if size != target.vocabulary:
            raise self.refused(
                f"transformer_layer_config.vocab_size: {size}, the target's is {target.vocabulary}"
            )
        try:
            return {name: each for path in weight_files(self.path) for name, each in load_file(path).items()}
        except (OSError, ValueError, SafetensorError) as error:
            raise self.refused(f"the weights cannot be read ({error})") from None

    def filled(
        self, head: AnyHead, tensors: Mapping[str, Tensor], target: TargetSizes, *other: str
    ) -> AnyHead:
        """The head of the device meta with these tensors, in the target's type and on its device.

        other: tensors that there may be besides. Raises InvalidModel: what does not fit, by its name.
        """
        besides = {*NOT_READ, *other}
        try:
            fill(head, tensors, f"a target of hidden size {target.hidden}", self._title, besides)
        except ValueError as error:
            raise self.refused(str(error)) from None
        head = head.to(dtype=target.embedding.dtype).requires_grad_(False)
        layer = self.layer_config()
        head.rotary_emb = LAYERS[layer.model_type][2](layer)  # in no file, and in float32 whatever serves
        head = head.to(device=target.embedding.device)
        check_parameters(head, self.path, field=self.field)
        return head

    def embeds(self, tensors: Mapping[str, Tensor], target: TargetSizes) -> bool:
        """Whether it has an embedding of its own. Raises InvalidModel: it has none, and the target's does not
        fit."""
        has, hidden = "embed_tokens.weight" in tensors, self.layer_config().hidden_size
        if not has and hidden != target.hidden:
            raise self.refused(
                f"embed_tokens.weight is missing, and the target's is of size {target.hidden}, not {hidden}"
            )
        return has

    def unembeds(self, tensors: Mapping[str, Tensor], target: TargetSizes, token_ids: Tensor) -> bool:
        """Whether it has an output layer of its own. token_ids: see `target_ids`. Raises InvalidModel: it has
        none, and the target's does not fit."""
        if "lm_head.weight" in tensors:
            return True
        hidden = self.layer_config().hidden_size
        if hidden != target.hidden:
            raise self.refused(
                f"lm_head.weight is missing, and the target's is of size {target.hidden}, not {hidden}"
            )
        if not torch.equal(token_ids, torch.arange(target.vocabulary)):
            raise self.refused(
                f"lm_head.weight is missing, and the target's is of its {target.vocabulary} tokens in their "
                f"order, not of the {len(token_ids)} that d2t names"
            )
        return False

    def target_ids(self, tensors: Mapping[str, Tensor], size: int, vocabulary: int) -> Tensor:
        """The target's id of each of the D ids of the head, [D], by its maps: d2t [D] is how far the target's
        id is behind the head's, t2d [V] whether the head has this token. Raises InvalidModel."""
        if "d2t" not in tensors:
            if size != vocabulary:
                raise self.refused(
                    f"d2t is missing, and draft_vocab_size is {size}, not the target's {vocabulary}"
                )
            return torch.arange(size)
        if tensors["d2t"].shape != (size,):
            raise self.refused(f"d2t is {[*tensors['d2t'].shape]}, draft_vocab_size is {size}")
        ids = torch.arange(size) + tensors["d2t"].long()
        wrong = ((ids < 0) | (ids >= vocabulary)).nonzero().flatten()
        if len(wrong):
            first = int(wrong[0])
            raise self.refused(
                f"d2t maps id {first} to {int(ids[first])}, beyond the target's 0 to {vocabulary - 1}"
            )
        if len(torch.unique(ids)) < size:
            raise self.refused("d2t maps two ids to one token")
        if "t2d" in tensors and not torch.equal(tensors["t2d"].nonzero().flatten(), ids.sort().values):
            raise self.refused("t2d names other tokens than d2t")
        return ids
