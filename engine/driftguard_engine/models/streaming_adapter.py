"""The weights of Speculative Streaming (Bhendawade et al. 2024, arXiv:2402.11131), in a layout of this
project: none was published.

    config.json    streaming_layers, the top layers of the target that streams run through; streaming_rank;
                   streaming_streams; streaming_choices where it has a tree of its own, as `medusa_choices`
    *.safetensors  embeddings [streams, H], and of layer L (from 0, the first of these) and projection P
                   layers.L.P.A [rank, in] and layers.L.P.B [out, rank]: what x A^T B^T adds to P of x

A stream enters these layers with what the first of them reads of the newest token read, and its embedding.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from driftguard_engine.core import InvalidModel
from driftguard_engine.models.directory import config_of
from driftguard_engine.models.llama_weights import Heads
from driftguard_engine.models.medusa_head import Choices, read_tensors, size_of, tree_of
from driftguard_engine.models.plausible import check_parameters, fill


@dataclass(frozen=True, slots=True)
class StreamingConfig:
    """choices: as of `MedusaConfig`."""

    layers: int
    rank: int
    streams: int
    choices: Choices


class LowRank(nn.Module):
    def __init__(self, rank: int, inner: int, out: int) -> None:
        super().__init__()
        self.A, self.B = nn.Parameter(torch.empty(rank, inner)), nn.Parameter(torch.empty(out, rank))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.A.T @ self.B.T


class StreamingAdapter(nn.Module):
    """Named as in the checkpoint."""

    def __init__(self, config: StreamingConfig, hidden: int, intermediate: int, heads: Heads) -> None:
        super().__init__()
        queries, keys = heads.queries * heads.dim, heads.keys * heads.dim
        sizes = {"q_proj": (hidden, queries), "k_proj": (hidden, keys), "v_proj": (hidden, keys)}
        sizes |= {"o_proj": (queries, hidden), "down_proj": (intermediate, hidden)}
        self.config = config
        self.embeddings = nn.Parameter(torch.empty(config.streams, hidden))
        self.layers = nn.ModuleList(
            nn.ModuleDict({name: LowRank(config.rank, *size) for name, size in sizes.items()})
            for _ in range(config.layers)
        )


def is_streaming(directory: Path) -> bool:
    """False too where config.json cannot be read."""
    try:
        return "streaming_layers" in config_of(directory)
    except (OSError, ValueError, TypeError):
        return False


def hidden_of(directory: Path) -> int:
    """The hidden size. Raises ValueError, KeyError."""
    return read_tensors(directory)["embeddings"].shape[1]


def read_adapter(
    directory: Path, layers: int, intermediate: int, heads: Heads, embedding: Tensor, *, field: str
) -> StreamingAdapter:
    """The adapter, in the type and on the device of the target's embedding [V or more, hidden]. layers,
    intermediate, heads: the target's. Raises InvalidModel: what does not fit, by its name."""
    hidden = embedding.shape[1]
    try:
        config = _config(config_of(directory), layers)
        with torch.device("meta"):
            adapter = StreamingAdapter(config, hidden, intermediate, heads)
        target = (
            f"{config.streams} streams of rank {config.rank} and a target of hidden size {hidden}, "
            f"intermediate size {intermediate}, {heads.queries} and {heads.keys} heads of {heads.dim}"
        )
        fill(adapter, read_tensors(directory), target, f"an adapter of {config.layers} layers")
    except ValueError as error:
        raise InvalidModel(
            f"{field}: the streaming adapter in {directory} cannot serve: {error}", field=field
        ) from None
    adapter = adapter.to(embedding).requires_grad_(False)
    check_parameters(adapter, directory, field=field)
    return adapter


def _config(told: Mapping[str, Any], layers: int) -> StreamingConfig:
    top, rank, streams = (size_of(told, f"streaming_{name}") for name in ("layers", "rank", "streams"))
    if top > layers:
        raise ValueError(f"streaming_layers: {top} are more than the target's {layers}")
    return StreamingConfig(top, rank, streams, tree_of(told, "streaming_choices", streams))
