"""Small Medusa heads."""

from __future__ import annotations

from pathlib import Path

import torch
from driftguard_engine.models.medusa_head import Choices, MedusaConfig, MedusaHeads
from driftguard_training.medusa import save_heads

TREE: Choices = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 0, 0), (0, 1, 1), (0, 0, 0, 0))


def save_random_heads(
    directory: Path, hidden: int, vocabulary: int, *, layers: int = 1, owns_output: bool = False
) -> str:
    heads = MedusaHeads(MedusaConfig(4, layers, TREE), hidden, vocabulary, owns_output=owns_output)
    torch.manual_seed(9)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    save_heads(directory, heads, TREE, torch.float32, {})
    return str(directory)
