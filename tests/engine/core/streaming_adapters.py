"""Small streaming adapters."""

from __future__ import annotations

from pathlib import Path

import torch
from driftguard_training.streaming import new_adapter, save_adapter

from tests.engine.core.eagle3_heads import load_target
from tests.engine.core.medusa_heads import TREE


def save_random_adapter(directory: Path, target: Path, layers: int) -> str:
    """Of four streams, near enough to the main one to guess right at times."""
    adapter = new_adapter(load_target(target), layers, rank=3, streams=4)
    torch.manual_seed(9)
    for parameter in adapter.parameters():
        torch.nn.init.normal_(parameter, std=0.15)
    save_adapter(directory, adapter, TREE, torch.float32, {})
    return str(directory)
