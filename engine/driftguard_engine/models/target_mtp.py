"""The layer for multi-token prediction (MTP) that lies in the target's own checkpoint.

It fuses the target's last hidden state at a token with the embedding of the next one by a linear layer, in
front of a decoder layer of the target's own kind, which transformers computes, and shares the target's
embedding and output layer:

    layer(fuse([token_norm(embedding), state_norm(hidden state)])), then output_norm

It is made for the next token but one. For drafts beyond it the layer is chained over itself: its output,
behind its norm, stands for the target's hidden state.

(DeepSeek-AI 2024, arXiv:2412.19437, section 2.2, and github.com/deepseek-ai/DeepSeek-V3, README_WEIGHTS.md;
transformers 5.24: modeling_layers.MtpLayer; vLLM: model_executor.models.deepseek_mtp, glm4_moe_mtp,
glm4_moe_lite_mtp, qwen3_next_mtp, qwen3_5_mtp; SGLang: srt.models.deepseek_nextn)
"""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoConfig
from transformers.cache_utils import Cache

from driftguard_engine.core import InvalidModel
from driftguard_engine.kv_cache import SlotCache, Span
from driftguard_engine.models.base import TokenModel
from driftguard_engine.models.chain_heads import ChainModel
from driftguard_engine.models.directory import loaded_files
from driftguard_engine.models.generic import SlotLayer
from driftguard_engine.models.plausible import check_names, check_parameters
from driftguard_engine.models.recurrent import cache_argument
from driftguard_engine.models.span_layers import filled

_COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers")  # in config.json; the latter of Qwen3.5
_EXPERTS = re.compile(r"(.*\.experts\.)(gate_up_proj|down_proj)")


@dataclass(frozen=True, slots=True)
class Layout:
    """Names in a checkpoint: `prefix`, and what is behind it. layer: how those of the decoder layer begin;
    copies: of tensors of the target, by their names."""

    prefix: str
    layer: str
    token_norm: str
    state_norm: str
    fuse: str
    output_norm: str
    copies: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Family:
    """Of transformers: the package in `models`, how the names of its classes begin, and how that of the
    rotary embedding goes on."""

    package: str
    classes: str
    layout: Layout
    rotary: str = "RotaryEmbedding"


_DEEPSEEK = Layout(
    "model.layers.{layers}.",
    "",
    "enorm",
    "hnorm",
    "eh_proj",
    "shared_head.norm",
    {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"},
)
_QWEN = Layout("mtp.", "layers.0.", "pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
FAMILIES: Final[Mapping[str, Family]] = {  # by model_type
    "deepseek_v3": Family("deepseek_v3", "DeepseekV3", _DEEPSEEK),
    "glm4_moe": Family("glm4_moe", "Glm4Moe", _DEEPSEEK),
    "glm4_moe_lite": Family("glm4_moe_lite", "Glm4MoeLite", _DEEPSEEK),
    "qwen3_next": Family("qwen3_next", "Qwen3Next", _QWEN),
    "qwen3_5_text": Family("qwen3_5", "Qwen3_5", _QWEN, "TextRotaryEmbedding"),
    "qwen3_5_moe_text": Family("qwen3_5_moe", "Qwen3_5Moe", _QWEN, "TextRotaryEmbedding"),
}


def names_of(config: Any) -> tuple[str, frozenset[str]] | None:
    """Of a target's configuration, how the names of the layer's tensors begin in its checkpoint, and those
    that are copies of the target's own; None: this kind has none that is read."""
    family = FAMILIES.get(config.model_type)
    if family is None:
        return None
    prefix = family.layout.prefix.format(layers=config.num_hidden_layers)
    return prefix, frozenset(prefix + name for name in family.layout.copies)


class TargetMtp(nn.Module):
    """The layer and what is around it."""

    def __init__(self, config: Any) -> None:
        """config: of the target."""
        super().__init__()
        family = FAMILIES[config.model_type]
        modeling = import_module(f"transformers.models.{family.package}.modeling_{family.package}")
        layer, norm, self._rotary, base = (
            getattr(modeling, family.classes + name)
            for name in ("DecoderLayer", "RMSNorm", family.rotary, "PreTrainedModel")
        )
        self._layout, self._config = family.layout, _alone(config)
        self._in_float32 = tuple(base._keep_in_fp32_modules_strict or ())
        hidden, epsilon = config.hidden_size, config.rms_norm_eps
        self.token_norm, self.state_norm, self.output_norm = (norm(hidden, epsilon) for _ in range(3))
        self.fuse = nn.Linear(2 * hidden, hidden, bias=False)
        self.layer = layer(self._config, 0)

    def fill(self, tensors: Mapping[str, Tensor], prefix: str, like: Tensor) -> None:
        """Puts the checkpoint's tensors, named by what is behind prefix, in place of those on "meta".

        like: has the type and the device. Raises ValueError: as `check_names`.
        """
        wanted: dict[str, torch.Size] = {}
        parts: dict[
            str, list[str]
        ] = {}  # of each tensor here; experts are joined here, and not in checkpoints
        shapes = {name: each.shape for name, each in self.state_dict().items()}
        for name, shape in shapes.items():
            told = prefix + self._told(name)
            parts[name], experts = [told], _EXPERTS.fullmatch(told)
            if experts is not None and self._told(name) not in tensors:
                kinds = ("gate_proj", "up_proj") if experts[2] == "gate_up_proj" else ("down_proj",)
                parts[name] = [f"{experts[1]}{at}.{kind}.weight" for at in range(shape[0]) for kind in kinds]
                shape = torch.Size((shape[1] // len(kinds), shape[2]))
            wanted |= dict.fromkeys(parts[name], shape)
        named = {prefix + name: each for name, each in tensors.items()}
        besides = [prefix + name for name in self._layout.copies]
        check_names(named, wanted, "this target", "its MTP layer", besides)
        state = {
            name: torch.cat([named[each] for each in parts[name]])
            .view(shape)
            .to(torch.float32 if name.endswith(self._in_float32) else like.dtype)
            for name, shape in shapes.items()
        }
        self.load_state_dict(state, assign=True)
        self.to(like.device).requires_grad_(False)
        self.rotary_emb = self._rotary(self._config).to(like.device)  # in no file

    def _told(self, name: str) -> str:
        """The checkpoint's name of a tensor, behind the prefix."""
        part, rest = name.split(".", 1)
        return self._layout.layer + rest if part == "layer" else f"{getattr(self._layout, part)}.{rest}"

    def forward(
        self, embedded: Tensor, hidden: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache
    ) -> Tensor:
        """What the output layer reads, [1, T, hidden], of embeddings and hidden states [1, T, hidden].
        positions [1, T]; mask: additive, [1, 1, T, what is seen]."""
        fused = self.fuse(torch.cat([self.token_norm(embedded), self.state_norm(hidden)], -1))
        # Of time, height and width, which older releases of transformers ask for; of text all are the same.
        grids = positions.expand(3, -1, -1) if hasattr(self.rotary_emb, "mrope_section") else positions
        output = self.layer(
            fused,
            attention_mask=mask,
            position_ids=positions,
            position_embeddings=self.rotary_emb(fused, grids),
            **{cache_argument(self.layer): cache},
        )
        found: Tensor = self.output_norm(output)
        return found


def read_target_mtp(directory: Path, like: Tensor) -> tuple[TargetMtp, str]:
    """The layer in a target's directory, and its version: 12 hex digits of the SHA-256 of its tensors.

    like: has the type and the device it serves in. Raises InvalidModel: there is none, or what does not fit,
    by its name.
    """
    config = AutoConfig.from_pretrained(str(directory), trust_remote_code=False).get_text_config()
    names = names_of(config)
    if names is None:
        raise _refused(
            directory,
            f"of the model_type {config.model_type!r} none is read, only of {', '.join(FAMILIES)}",
        )
    prefix = names[0]
    key = next((each for each in _COUNTS if hasattr(config, each)), _COUNTS[0])
    if not (count := getattr(config, key, 1)):
        raise _refused(directory, f"its config.json says {key} 0")
    layout = FAMILIES[config.model_type].layout
    tensors, originals = _read(directory, prefix, [*layout.copies.values()])
    if not tensors:
        raise _refused(
            directory, f"its checkpoint has no tensor {prefix}*, as if it was saved without the layer"
        )
    try:
        head = _filled(config, key, count, tensors, originals, prefix, like)
    except ValueError as error:
        raise InvalidModel(
            f"target: the MTP layer in {directory} cannot serve: {error}", field="target"
        ) from None
    check_parameters(head, directory, field="target")
    return head, _version(tensors)


def _filled(
    config: Any,
    key: str,
    count: int,
    tensors: Mapping[str, Tensor],
    originals: Mapping[str, Tensor],
    prefix: str,
    like: Tensor,
) -> TargetMtp:
    if count != 1:
        raise ValueError(f"{key}: {count!r}, only 1 is computed")
    for name, original in FAMILIES[config.model_type].layout.copies.items():
        used = originals.get(original, originals.get("model.embed_tokens.weight"))  # tied: one for both
        if name in tensors and used is not None and not torch.equal(tensors[name], used):
            raise ValueError(f"{prefix}{name} is not equal to {original}, which is used in its place")
    with torch.device("meta"):
        head = TargetMtp(config)
    head.fill(tensors, prefix, like)
    return head


class TargetMtpModel(ChainModel):
    """See `ChainModel`. Sequences run one at a time, as those of `GenericModel`."""

    def __init__(self, head: TargetMtp, target: TokenModel, slots: int, room: int) -> None:
        """room: positions of a slot."""
        self.features = (target.layers,)
        self._head, self._embedding, self._unembed = head, target.embedding, target.unembed
        self._cache = SlotCache(slots, room, target.embedding.device, target.embedding.dtype)
        self._layer = SlotLayer(self._cache, 0)
        self._past = Cache(layers=[self._layer])
        # One token now allocates the keys and values, in front of the kept states.
        self.read([0], [Span(0, 0, 1)], target.embedding.new_zeros(1, target.hidden))
        self._cache.add_layer(1, target.hidden, 0)

    def _kept(self, features: Tensor) -> Tensor:
        return features

    @torch.inference_mode()
    def read(self, token_ids: Sequence[int], spans: Sequence[Span], hidden: Tensor | None = None) -> Tensor:
        if hidden is None:
            hidden = self._cache.keys[-1][self._cache.places(spans), 0]
        outputs, first = [], 0
        for span in spans:
            last = first + span.count
            # Fresh copies: memory alignment can change bits.
            outputs.append(self._run(token_ids[first:last], span, hidden[first:last].clone()))
            first = last
        return torch.cat(outputs)

    def _run(self, token_ids: Sequence[int], span: Span, hidden: Tensor) -> Tensor:
        self._layer.point_at(span)
        device, mask = hidden.device, None
        if span.count > 1:
            lowest = torch.finfo(hidden.dtype).min
            mask = hidden.new_full((span.count, span.end), lowest).triu_(span.start + 1)[None, None]
        embedded = self._embedding[torch.tensor(token_ids, device=device)]
        positions = torch.arange(span.start, span.end, device=device)[None]
        found: Tensor = self._head(embedded[None], hidden[None], positions, mask, self._past)
        return found[0]

    @torch.inference_mode()
    def predict(self, output: Tensor) -> tuple[Tensor, Tensor]:
        return self._unembed(filled(output))[: len(output)], output


def _alone(config: Any) -> Any:
    """The target's configuration for this one layer: of full attention, and of experts where there are."""
    alone = copy.deepcopy(config)
    alone.num_hidden_layers = 1
    for name, value in (
        ("first_k_dense_replace", 0),
        ("layer_types", ["full_attention"]),
        ("mlp_layer_types", ["sparse"]),
    ):
        if getattr(alone, name, None) is not None:
            setattr(alone, name, value)
    alone._attn_implementation = "sdpa"
    return alone


def _read(directory: Path, prefix: str, others: Sequence[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors whose names begin so, by what is behind it, and these others where they are."""
    tensors: dict[str, Tensor] = {}
    whole: dict[str, Tensor] = {}
    for path in loaded_files(directory):
        with safe_open(path, "pt") as file:
            for name in file.keys():  # noqa: SIM118 it is no dict
                if name.startswith(prefix):
                    tensors[name.removeprefix(prefix)] = file.get_tensor(name)
                elif name in others:
                    whole[name] = file.get_tensor(name)
    return tensors, whole


def _version(tensors: Mapping[str, Tensor]) -> str:
    digest = hashlib.sha256()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name].contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]


def _refused(directory: Path, why: str) -> InvalidModel:
    return InvalidModel(
        f"target: {directory} has no layer for multi-token prediction that could draft: {why}; --drafter mtp "
        "takes it from the target's checkpoint, or with --draft one that speculators converted",
        field="target",
    )
