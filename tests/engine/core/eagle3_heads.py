"""Small EAGLE-3 heads, and what a head that is read place after place predicts, computed anew for a whole
sequence in float64."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from driftguard_engine.models.eagle3_head import Eagle3Head, HeadConfig
from driftguard_engine.models.speculators import AnyHead, TargetSizes
from driftguard_training.heads import head_loss, new_head, save_head
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3Config


def load_target(directory: Path) -> Any:
    module: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return module.eval()


def sizes_of(target: Any) -> TargetSizes:
    config = target.config.get_text_config()
    embedding = target.get_input_embeddings().weight.detach()
    return TargetSizes(config.vocab_size, config.num_hidden_layers, config.hidden_size, embedding)


def layer_like(target: Any, kind: type[LlamaConfig | Qwen3Config] = LlamaConfig, head_dim: int = 8) -> Any:
    """Kernels compute the layer from a `head_dim` of 16 on."""
    config = target.config.get_text_config()
    heads = 4 if config.hidden_size % 4 == 0 else 3
    return kind(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=2 if heads == 4 else 1,
        head_dim=head_dim,
        max_position_embeddings=160,
    )


def save_random_head(
    directory: Path, target: Any, token_ids: Sequence[int], features: tuple[int, ...], **norms: Any
) -> str:
    """As `random_head`."""
    head = random_head(target, len(token_ids), features, **norms)
    save_head(directory, head, torch.tensor(token_ids), torch.float32, {})
    return str(directory)


def random_head(
    target: Any, vocabulary: int, features: tuple[int, ...], *, head_dim: int = 8, **norms: bool
) -> Eagle3Head:
    """Far from uniform, and of no use. `embeds`, `unembeds`: with an embedding (without it: no), an output
    layer (yes) of its own; `qwen3`: a layer of Qwen3."""
    kind = Qwen3Config if norms.pop("qwen3", False) else LlamaConfig
    layer = layer_like(target, kind, head_dim)
    ends = {"embeds": norms.pop("embeds", False), "unembeds": norms.pop("unembeds", True)}
    return disturbed(Eagle3Head(HeadConfig(layer, vocabulary, features, **norms), layer.hidden_size, **ends))


def disturbed(head: AnyHead, scale: float = 0.25) -> AnyHead:
    """Far from uniform, and of no use."""
    torch.manual_seed(11)
    for parameter in head.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=scale)
        else:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return head


def save_distilled_head(directory: Path, target_directory: Path, texts: Sequence[Sequence[int]]) -> str:
    """Of these texts it drafts much right: trained on them in seconds. It lacks the tokens 3, 13, 23, ..."""
    torch.set_num_threads(1)  # in fixtures of a module or session, too; threads would wait for each other
    target = load_target(target_directory)
    token_ids = torch.tensor([each for each in range(target.config.vocab_size) if each % 10 != 3])
    torch.manual_seed(12)
    head = new_head(target, (0, 1), token_ids, layer_like(target))
    optimizer = torch.optim.AdamW(head.parameters(), lr=5e-3)
    longest = max(map(len, texts))
    tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    for _ in range(60):
        loss, _ = head_loss(head, target, token_ids, tokens, 3, "forward-kl")
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    save_head(directory, head, token_ids, torch.float32, {})
    return str(directory)


class Reference:
    """The head in a directory, by the formulas of the paper: place after place, and nothing is kept."""

    layers: Sequence[str] = ("layers.0",)

    def __init__(self, directory: Path, target: Any) -> None:
        self._config = json.loads((directory / "config.json").read_text())
        self._layer = self._config["transformer_layer_config"]
        self._weights = {
            name: each.double() for name, each in load_file(directory / "model.safetensors").items()
        }
        self._target = target
        self.size = self._layer["vocab_size"]

    def logits(self, sequence: Sequence[int], drafts: Sequence[int]) -> Tensor:
        """[len(drafts), V]: from which each of these drafts behind the sequence should have been drawn."""
        with torch.inference_mode():
            told = self._target(torch.tensor([sequence]), output_hidden_states=True).hidden_states
        fused = self._fused([each[0].double() for each in told])
        found: list[Tensor] = []
        places: list[list[tuple[Tensor, Tensor]]] = [[] for _ in self.layers]
        for place in range(len(sequence) - 1):
            output = self._place(places, fused[place], sequence[place + 1])
        for draft in drafts:
            logits, following = self._predicted(output)
            found.append(logits)
            output = self._place(places, *self._following(following, draft))
        return torch.stack(found).float()

    def drafts(self, sequence: Sequence[int], asked: int) -> int:
        """How many drafts there should be behind the sequence, where so many are asked for."""
        return asked if len(sequence) > 1 else 0  # of one token the target has read nothing yet

    def _following(self, vector: Tensor, draft: int) -> tuple[Tensor, int]:
        """What is read behind a draft."""
        return vector, draft

    def _predicted(self, output: Tensor) -> tuple[Tensor, Tensor]:
        """Logits, and what stands for the fused vector at the next place."""
        normed = self._norm(output, "norm")
        layer = self._weights.get("lm_head.weight")
        if layer is None:
            layer = self._target.get_output_embeddings().weight.detach().double()
        logits = self._spread(layer @ normed)
        return logits, normed if self._config["norm_output"] else output

    def _fused(self, states: list[Tensor]) -> Tensor:
        states = [states[layer] for layer in self._config["eagle_aux_hidden_state_layer_ids"]]
        if self._config["fc_norm"]:
            states = [self._norm(each, f"fc_norm.{index}") for index, each in enumerate(states)]
        features = torch.cat(states, -1)
        if self._config["norm_before_fc"]:
            features = self._norm(features, "input_norm")
        return features @ self._weights["fc.weight"].T

    def _embedded(self, token: int) -> Tensor:
        embedding = self._weights.get("embed_tokens.weight")
        if embedding is None:
            embedding = self._target.get_input_embeddings().weight.detach().double()
        return embedding[token]

    def _entered(self, vector: Tensor, token: int) -> tuple[Tensor, Tensor]:
        """What attention reads, and what its output is added to."""
        normed = self._norm(vector, "layers.0.hidden_norm")
        read = torch.cat([self._norm(self._embedded(token), "layers.0.input_layernorm"), normed])
        return read, normed if self._config["norm_before_residual"] else vector

    def _place(self, places: list[list[tuple[Tensor, Tensor]]], vector: Tensor, token: int) -> Tensor:
        """Appends its keys and values to `places`; what the last layer gives there, [hidden]."""
        read, hidden = self._entered(vector, token)
        for index, (name, seen) in enumerate(zip(self.layers, places, strict=True)):
            if index:
                read = self._norm(hidden, f"{name}.input_layernorm")
            place = len(seen)
            seen.append(self._key_and_value(name, read, place))
            hidden = self._layered(name, seen, read, hidden, place)
        return hidden

    def _projected(self, name: str, part: str, read: Tensor) -> Tensor:
        """[heads, dim]"""
        found = (self._weights[f"{name}.self_attn.{part}_proj.weight"] @ read).view(
            -1, self._layer["head_dim"]
        )
        norm = f"{name}.self_attn.{part}_norm"
        return self._norm(found, norm) if f"{norm}.weight" in self._weights else found

    def _key_and_value(self, name: str, read: Tensor, place: int) -> tuple[Tensor, Tensor]:
        return self._rotated(self._projected(name, "k", read), place), self._projected(name, "v", read)

    def _layered(
        self, name: str, seen: list[tuple[Tensor, Tensor]], read: Tensor, residual: Tensor, place: int
    ) -> Tensor:
        """What the layer gives at this place, [hidden], where it sees these keys and values."""
        query = self._rotated(self._projected(name, "q", read), place)
        keys, values = (
            torch.stack(each).repeat_interleave(len(query) // len(each[0]), 1)
            for each in zip(*seen, strict=True)
        )  # [places, heads, dim]
        scores = (keys * query).sum(-1, keepdim=True) / math.sqrt(query.shape[-1])
        mixed = (scores.softmax(0) * values).sum(0).flatten()
        hidden = residual + self._weights[f"{name}.self_attn.o_proj.weight"] @ mixed
        normed = self._norm(hidden, f"{name}.post_attention_layernorm")
        gate, up, down = (self._weights[f"{name}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return hidden + down @ (torch.nn.functional.silu(gate @ normed) * (up @ normed))

    def _rotated(self, x: Tensor, place: int) -> Tensor:
        half = x.shape[-1] // 2
        theta = self._layer["rope_parameters"]["rope_theta"]
        angles = place * theta ** (-torch.arange(half, dtype=torch.float64) / half)
        first, second = x[:, :half], x[:, half:]
        cos, sin = angles.cos(), angles.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + self._layer["rms_norm_eps"]).rsqrt()
        normed: Tensor = x * scale * self._weights[f"{name}.weight"]
        return normed

    def _spread(self, logits: Tensor) -> Tensor:
        if "d2t" not in self._weights:
            return logits
        ids = torch.arange(len(logits)) + self._weights["d2t"].long()
        return torch.full((self.size,), -torch.inf, dtype=logits.dtype).index_copy_(0, ids, logits)
