"""Small MTP, EAGLE, P-EAGLE, DFlash and DSpark heads, and what each predicts, computed anew for a whole
sequence in float64."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from driftguard_engine.models.dflash_head import BlockConfig, BlockHead
from driftguard_engine.models.eagle3_head import Eagle3Head, HeadConfig
from driftguard_engine.models.fused_head import EagleHead, MtpHead
from driftguard_training.heads import save_head
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config

from tests.engine.core.eagle3_heads import Reference, disturbed, layer_like

BLOCKS = ("dflash", "dspark")
KINDS = ("eagle", "mtp", "peagle", *BLOCKS)


def save_random(
    directory: Path, kind: str, target: Any, token_ids: Sequence[int] | None = None, **settings: Any
) -> str:
    """As `random`. token_ids: those it drafts; None: all."""
    ids = torch.tensor(range(target.config.vocab_size) if token_ids is None else token_ids)
    save_head(directory, random(kind, target, len(ids), **settings), ids, torch.float32, {})
    return str(directory)


def random(kind: str, target: Any, vocabulary: int, **settings: Any) -> Any:
    """Far from uniform, and of no use. settings: of the kind."""
    layer = layer_like(target, Qwen3Config if kind in BLOCKS else settings.pop("layer", LlamaConfig))
    deep, hidden = target.config.num_hidden_layers, layer.hidden_size
    if kind == "mtp":
        return disturbed(MtpHead(layer, deep))
    if kind == "eagle":  # nothing normalises what it gives from place to place
        return disturbed(EagleHead(layer, deep, **{"norms": False, "bias": False} | settings), 0.1)
    layer.num_hidden_layers = settings.pop("layers", 2 if kind in BLOCKS else 1)
    settings = dict[str, Any](features=(0, 1), mask_token_id=5) | settings
    if kind == "peagle":
        ends = {"embeds": True, "unembeds": settings.pop("unembeds", True)}
        return disturbed(Eagle3Head(HeadConfig(layer, vocabulary, **settings), hidden, **ends))
    layer.layer_types = ["full_attention"] * layer.num_hidden_layers
    settings = dict[str, Any](block=5, drafts_at_first=kind == "dspark") | settings
    settings |= {"markov_rank": 4} if kind == "dspark" else {}
    config = BlockConfig(layer, vocabulary, **settings)
    return disturbed(BlockHead(config, hidden, embeds=False))


class OfFused(Reference):
    """MTP and EAGLE."""

    def __init__(self, directory: Path, target: Any) -> None:
        super().__init__(directory, target)
        mtp = self._config["speculators_model_type"] == "mtp"
        self.layers = ("mtp_layers.0",) if mtp else ("transformer",)
        names = ("token_layernorm", "hidden_layernorm", "final_layernorm")
        self._names = [f"mtp_layers.0.{name}" for name in names]
        if not mtp:
            self._names = ["embedding_layernorm", "", "pre_lm_head_layernorm"]
        self._fuse = "mtp_layers.0.input_proj" if mtp else "fusion_fc"
        self._feeds_normed = mtp

    def _fused(self, states: list[Tensor]) -> Tensor:
        return states[-1]

    def _entered(self, vector: Tensor, token: int) -> tuple[Tensor, Tensor]:
        token_norm, state_norm, _ = self._names
        read = torch.cat([self._normed(self._embedded(token), token_norm), self._normed(vector, state_norm)])
        fused = self._weights[f"{self._fuse}.weight"] @ read + self._weights.get(f"{self._fuse}.bias", 0)
        return self._normed(fused, f"{self.layers[0]}.input_layernorm"), fused

    def _predicted(self, output: Tensor) -> tuple[Tensor, Tensor]:
        normed = self._normed(output, self._names[2])
        logits = self._target.get_output_embeddings().weight.detach().double() @ normed
        return logits, normed if self._feeds_normed else output

    def _normed(self, x: Tensor, name: str) -> Tensor:
        return self._norm(x, name) if f"{name}.weight" in self._weights else x


class OfPeagle(Reference):
    def __init__(self, directory: Path, target: Any) -> None:
        super().__init__(directory, target)
        self.layers = [f"layers.{index}" for index in range(self._layer["num_hidden_layers"])]

    def _following(self, vector: Tensor, draft: int) -> tuple[Tensor, int]:
        features = self._config["eagle_aux_hidden_state_layer_ids"]
        parts = self._weights["mask_hidden"].flatten().chunk(len(features))
        states = dict(zip(features, parts, strict=True))
        fused = self._fused([states.get(layer, parts[0]) for layer in range(max(features) + 1)])
        return fused, self._config["mask_token_id"]


class OfBlock(Reference):
    """DFlash and DSpark."""

    def drafts(self, sequence: Sequence[int], asked: int) -> int:
        return min(asked, int(self._config["block_size"]) - (not self._config["sample_from_anchor"]))

    def logits(self, sequence: Sequence[int], drafts: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            told = self._target(torch.tensor([sequence]), output_hidden_states=True).hidden_states
        layers = self._config["aux_hidden_state_layer_ids"]
        context = torch.cat([told[layer][0, :-1].double() for layer in layers], -1)
        context = self._norm(context @ self._weights["fc.weight"].T, "hidden_norm")
        size, first = self._config["block_size"], len(sequence) - 1
        hidden = [
            self._embedded(token) for token in (sequence[-1], *[self._config["mask_token_id"]] * (size - 1))
        ]
        for layer in range(self._layer["num_hidden_layers"]):
            name = f"layers.{layer}"
            seen = [self._key_and_value(name, each, place) for place, each in enumerate(context)]
            read = [self._norm(each, f"{name}.input_layernorm") for each in hidden]
            seen += [self._key_and_value(name, each, place) for place, each in enumerate(read, first)]
            hidden = [
                self._layered(name, seen, each, residual, place)
                for place, (each, residual) in enumerate(zip(read, hidden, strict=True), first)
            ]
        normed = [self._norm(each, "norm") for each in hidden]
        skipped = int(not self._config["sample_from_anchor"])
        biases = self._biases(normed, [*[sequence[-1]] * skipped, sequence[-1], *drafts])
        found = [
            self._spread(self._weights["lm_head.weight"] @ each + bias)
            for each, bias in zip(normed, biases, strict=False)
        ]
        return torch.stack(found[skipped : skipped + len(drafts)]).float()

    def _biases(self, normed: list[Tensor], before: Sequence[int]) -> list[Tensor]:
        if "markov_head.markov_w1.weight" not in self._weights:
            return [torch.zeros(())] * len(normed)
        found: list[Tensor] = []
        state = torch.zeros(self._config["markov_rank"], dtype=torch.float64)
        for hidden, token in zip(normed, before, strict=False):
            embedded = self._weights["markov_head.markov_w1.weight"][token]
            kind = self._config["markov_head_type"]
            if kind == "gated":
                embedded = embedded * self._affine("gate_proj", torch.cat([hidden, embedded])).sigmoid()
            if kind == "rnn":
                told = self._affine("joint_proj", torch.cat([state, embedded, hidden]))
                gate, candidate, output = told.chunk(3)
                state = gate.sigmoid() * state + (1 - gate.sigmoid()) * candidate.tanh()
                embedded = output.tanh()
            found.append(self._weights["markov_head.markov_w2.weight"] @ embedded)
        return found

    def _affine(self, name: str, read: Tensor) -> Tensor:
        weight, bias = (self._weights[f"markov_head.{name}.{part}"] for part in ("weight", "bias"))
        return weight @ read + bias


def reference_of(directory: Path, target: Any) -> Reference:
    """Of a head of any kind."""
    kind = json.loads((directory / "config.json").read_text())["speculators_model_type"]
    found: dict[str, type[Reference]] = {"mtp": OfFused, "eagle": OfFused, "peagle": OfPeagle}
    found |= {"dflash": OfBlock, "dspark": OfBlock}
    return found.get(kind, Reference)(directory, target)
