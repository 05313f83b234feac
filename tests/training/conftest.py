from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.training.small_models import save_directory, small_model, write_traffic


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True, slots=True)
class Pair:
    """A target, a draft that was not trained on it, and traffic of the target."""

    target: Path
    draft: Path
    train: Path
    heldout: Path


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    root = tmp_path_factory.mktemp("pair")
    target = small_model(1)
    return Pair(
        target=save_directory(root / "target", target),
        draft=save_directory(root / "draft", small_model(2)),
        train=write_traffic(root / "train.jsonl", target, requests=160, seed=3),
        heldout=write_traffic(root / "heldout.jsonl", target, requests=40, seed=4),
    )
