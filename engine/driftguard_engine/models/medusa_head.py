"""The weights of Medusa heads (Cai et al. 2024, arXiv:2401.10774), in the layout of the paper's authors.

    config.json    medusa_num_heads, medusa_num_layers; medusa_choices where it has a tree of its own
    *.safetensors  of head H: residual blocks H.L.linear.weight and H.L.linear.bias, then its output layer
                   H.N.weight behind its N blocks; with none in any head, that is the target's

(github.com/FasterDecoding/Medusa, January 2024: model.medusa_model, model.medusa_model_legacy, and
train.train_legacy, which writes medusa_lm_head.safetensors. Its trees are lists in model.medusa_choices; in
config.json they are of this project.) A head reads what the target's output layer reads: the last hidden
state, normalised.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from driftguard_engine.core import InvalidModel
from driftguard_engine.models.directory import config_of, weight_files
from driftguard_engine.models.plausible import check_parameters, fill

NODES: Final = 16  # of a tree that is not told
_ASSUMED: Final = (0.6, 0.5)  # how often the likeliest token of the first head is right; and of others, of it

Choices = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class MedusaConfig:
    """choices: the nodes of the tree, each as the ranks of the tokens on its way, parents first."""

    heads: int
    layers: int
    choices: Choices


class ResidualBlock(nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.linear = nn.Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        return x + nn.functional.silu(self.linear(x))


class MedusaHeads(nn.ModuleList):
    """Named as in the checkpoint. Each head gives what the target's output layer reads, or logits where it
    has an output layer of its own."""

    def __init__(self, config: MedusaConfig, hidden: int, vocabulary: int, *, owns_output: bool) -> None:
        def head() -> nn.Sequential:
            parts: list[nn.Module] = [ResidualBlock(hidden) for _ in range(config.layers)]
            if owns_output:
                parts.append(nn.Linear(hidden, vocabulary, bias=False))
            return nn.Sequential(*parts)

        super().__init__(head() for _ in range(config.heads))
        self.config, self.owns_output = config, owns_output


def most_likely_tree(accuracies: Sequence[Sequence[float]], nodes: int) -> Choices:
    """The `nodes` paths with the largest product of accuracies[depth][rank], which fall with the rank; by
    depth, then by ranks."""
    found: list[tuple[int, ...]] = []
    waiting: list[tuple[float, tuple[int, ...]]] = [(-accuracies[0][0], (0,))]
    while waiting and len(found) < nodes:
        product, path = heapq.heappop(waiting)
        found.append(path)
        depth, rank = len(path), path[-1]
        if rank + 1 < len(accuracies[depth - 1]):
            ratio = accuracies[depth - 1][rank + 1] / accuracies[depth - 1][rank]
            heapq.heappush(waiting, (product * ratio, (*path[:-1], rank + 1)))
        if depth < len(accuracies):
            heapq.heappush(waiting, (product * accuracies[depth][0], (*path, 0)))
    return tuple(sorted(found, key=lambda path: (len(path), path)))


def assumed_tree(heads: int) -> Choices:
    """Where nothing was measured."""
    first, share = _ASSUMED
    likeliest = [first * 0.9**depth for depth in range(heads)]
    return most_likely_tree([[each * (1 - share) ** rank for rank in range(10)] for each in likeliest], NODES)


def is_medusa(directory: Path) -> bool:
    """False too where config.json cannot be read."""
    try:
        return "medusa_num_heads" in config_of(directory)
    except (OSError, ValueError, TypeError):
        return False


def read_config(directory: Path, *, field: str) -> MedusaConfig:
    """Raises InvalidModel."""
    told = config_of(directory)
    try:
        heads, layers = (size_of(told, name) for name in ("medusa_num_heads", "medusa_num_layers"))
        return MedusaConfig(heads, layers, tree_of(told, "medusa_choices", heads))
    except ValueError as error:
        raise _refused(str(error), directory, field) from None


def size_of(told: Mapping[str, Any], name: str) -> int:
    """Raises ValueError."""
    size = told.get(name)
    if not isinstance(size, int) or isinstance(size, bool) or not 0 < size <= 32:
        raise ValueError(f"{name}: {size!r} is no number between 1 and 32")
    return size


def tree_of(told: Mapping[str, Any], name: str, depth: int) -> Choices:
    """The tree under this name; where there is none, `assumed_tree`. Raises ValueError."""

    def is_path(path: Any) -> bool:
        return isinstance(path, list) and all(isinstance(rank, int) and 0 <= rank < 1024 for rank in path)

    choices = told.get(name)
    if choices is None:
        return assumed_tree(depth)
    if not (isinstance(choices, list) and choices and all(map(is_path, choices))):
        raise ValueError(f"{name}: no list of lists of ranks")
    paths = {tuple(path) for path in choices}
    for path in sorted(paths):
        if not 0 < len(path) <= depth:
            raise ValueError(f"{name}: {[*path]} is not 1 to {depth} deep")
        if path[:-1] and path[:-1] not in paths:
            raise ValueError(f"{name}: {[*path]} has no parent {[*path[:-1]]}")
    return tuple(sorted(paths, key=lambda path: (len(path), path)))


def sizes_of(directory: Path) -> tuple[int, int]:
    """The hidden size, and how many tokens the heads' own output layers have; 0 without these.

    Raises OSError, KeyError, SafetensorError.
    """
    shapes: dict[str, list[int]] = {}
    for path in weight_files(directory):
        with safe_open(path, "pt") as file:
            shapes |= {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    output = f"0.{config_of(directory)['medusa_num_layers']}.weight"
    return shapes["0.0.linear.weight"][1], shapes.get(output, [0])[0]


def read_heads(directory: Path, target_embedding: Tensor, vocabulary: int, *, field: str) -> MedusaHeads:
    """The heads, in the type and on the device of the target's embedding [V or more, width], which is as wide
    as what its output layer reads. vocabulary: V. Raises InvalidModel: what does not fit, by its name."""
    config, hidden = read_config(directory, field=field), target_embedding.shape[1]
    try:
        tensors = read_tensors(directory)
        with torch.device("meta"):
            owns_output = f"0.{config.layers}.weight" in tensors
            heads = MedusaHeads(config, hidden, vocabulary, owns_output=owns_output)
        fill(
            heads,
            tensors,
            f"a target of hidden size {hidden} and {vocabulary} tokens",
            f"{config.heads} heads",
        )
    except ValueError as error:
        raise _refused(str(error), directory, field) from None
    heads = heads.to(target_embedding).requires_grad_(False)
    check_parameters(heads, directory, field=field)
    return heads


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Raises ValueError: there are none, or they cannot be read."""
    try:
        tensors = {name: each for path in weight_files(directory) for name, each in load_file(path).items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"the weights cannot be read ({error})") from None
    if not tensors:
        raise ValueError("it has no *.safetensors; weights as *.pt are not read")
    return tensors


def _refused(what: str, directory: Path, field: str) -> InvalidModel:
    return InvalidModel(f"{field}: the Medusa heads in {directory} cannot serve: {what}", field=field)
