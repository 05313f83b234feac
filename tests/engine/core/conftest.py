from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from driftguard_engine.config import EngineConfig
from driftguard_engine.decode import placement
from driftguard_engine.engine import Engine

from tests.engine.core.tiny import save


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories: llama, odd_llama, gpt2, gpt_neox, and for each one with disturbed weights, KIND_draft."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("llama", "odd_llama", "gpt2", "gpt_neox"):
        save(root / kind, kind, seed=3)
        save(root / f"{kind}_draft", kind, seed=3, noise=0.03)
    return root


@pytest.fixture(scope="session")
def new_engine(models: Path) -> Callable[..., Engine]:
    """ahead: steps are padded and run one ahead of the host, as on a GPU."""

    def make(kind: str = "llama", *, ahead: bool = False, **changes: Any) -> Engine:
        target, draft = str(models / kind), str(models / f"{kind}_draft")
        settings: dict[str, Any] = {
            "target": target,
            "draft": draft,
            "max_batch": 4,
            "prefill_chunk_tokens": 8,
        } | changes
        with mock.patch.object(placement, "runs_ahead", return_value=ahead):
            return Engine(EngineConfig(**settings))

    return make
