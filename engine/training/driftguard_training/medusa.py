"""Training and saving Medusa heads for a target that stays as it is (Medusa-1, Cai et al. 2024)."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from driftguard_engine.models.medusa_head import NODES, Choices, MedusaConfig, MedusaHeads
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from driftguard_training.acceptance import chain_loss
from driftguard_training.model_directories import save_files
from driftguard_training.settings import Loss

WEIGHTS = "medusa_lm_head.safetensors"
_RANKS = 10  # of a head's tokens that may become nodes


def new_heads(target: PreTrainedModel, heads: int, layers: int, choices: Choices = ()) -> MedusaHeads:
    """Heads with the target's output layer, which begin as the identity."""
    config = MedusaConfig(heads, layers, choices)
    vocabulary, hidden = cast("Any", target).get_output_embeddings().weight.shape
    made = MedusaHeads(config, hidden, vocabulary, owns_output=False)
    for parameter in made.parameters():
        torch.nn.init.zeros_(parameter)
    return made


def head_logits(heads: MedusaHeads, target: PreTrainedModel, states: Tensor) -> Iterator[Tensor]:
    """Logits [..., V] of each head, from the target's last hidden states [..., H]."""
    output = cast("Any", target).get_output_embeddings()
    for head in heads:
        made = head(states)
        yield made if heads.owns_output else output(made)


def heads_loss(
    heads: MedusaHeads, target: PreTrainedModel, tokens: Tensor, loss: Loss
) -> tuple[Tensor, list[float]]:
    """The mean loss of all heads at every place of tokens [R, L], and the mean acceptance probability of what
    each drafts."""
    with torch.no_grad():
        told = target(input_ids=tokens, output_hidden_states=True)
        p = torch.softmax(told.logits, -1)  # [R, L, V]
    counted = torch.ones(tokens.shape[0], tokens.shape[1] + 1, dtype=torch.bool)
    drafted = head_logits(heads, target, told.hidden_states[-1][:, :-1])
    total, accepted = chain_loss(p, counted, drafted, loss)
    return total, [each.mean().item() for each in accepted]


@torch.no_grad()
def measured_tree(heads: MedusaHeads, target: PreTrainedModel, tokens: Tensor, nodes: int = NODES) -> Choices:
    """The paths of ranks that tokens [R, L] took most often among each head's likeliest: so many nodes, by
    depth, then by ranks. A node's parent is taken at least as often."""
    states = target(input_ids=tokens, output_hidden_states=True).hidden_states[-1]
    places = tokens.shape[1] - len(heads) - 1  # of which every head's token is known
    return most_taken(head_logits(heads, target, states[:, :places]), tokens, nodes)


def most_taken(drafted: Iterable[Tensor], tokens: Tensor, nodes: int = NODES) -> Choices:
    """As `measured_tree`. drafted: logits [R, P, V] of each depth, at the first P places of tokens [R, L]."""
    ranks = []
    for step, logits in enumerate(drafted):
        places = logits.shape[1]
        same = logits.topk(_RANKS).indices == tokens[:, 2 + step : 2 + step + places, None]
        ranks.append(torch.where(same.any(-1), same.int().argmax(-1), -1).flatten())
    taken: Counter[tuple[int, ...]] = Counter()
    for path in torch.stack(ranks, -1).tolist():
        known = path.index(-1) if -1 in path else len(path)
        taken.update(tuple(path[:depth]) for depth in range(1, known + 1))
    chosen = sorted(taken, key=lambda path: (-taken[path], len(path), path))[:nodes]
    return tuple(sorted(chosen, key=lambda path: (len(path), path)))


def save_heads(
    output: Path,
    heads: MedusaHeads,
    choices: Choices,
    dtypes: Mapping[str, torch.dtype] | torch.dtype,
    provenance: Mapping[str, object],
    told: Mapping[str, object] = {},
) -> str:
    """Write a directory in the layout of Medusa's authors, atomically; returns its version. dtypes: of each
    weight, or of all. told: what else config.json has."""
    weights = {
        name: each.detach().to(dtypes if isinstance(dtypes, torch.dtype) else dtypes[name]).contiguous()
        for name, each in heads.state_dict().items()
    }
    config = {
        **told,
        "medusa_num_heads": heads.config.heads,
        "medusa_num_layers": heads.config.layers,
        "medusa_choices": [list(path) for path in choices],
    }

    def write(directory: Path) -> None:
        save_file(weights, directory / WEIGHTS, metadata={"format": "pt"})
        (directory / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")

    return save_files(output, write, provenance)
