from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from driftguard_engine.config import EngineConfig
from driftguard_engine.decode import placement
from driftguard_engine.engine import Engine

from tests.engine.core.eagle3_heads import save_distilled_head
from tests.engine.core.tiny import request, save, tokens


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories: llama, odd_llama, gpt2, gpt_neox, and for each one with disturbed weights, KIND_draft."""
    root = tmp_path_factory.mktemp("models")
    for kind in ("llama", "odd_llama", "gpt2", "gpt_neox"):
        save(root / kind, kind, seed=3)
        save(root / f"{kind}_draft", kind, seed=3, noise=0.03)
    return root


@pytest.fixture(scope="session")
def head_of(models: Path) -> Callable[[str], str]:
    """The directory of an EAGLE-3 head for the model of this kind, which drafts some of its text right."""

    @cache
    def make(kind: str) -> str:
        plain = Engine(EngineConfig(str(models / kind), drafter="none"))
        prompts = [(5, 6, 7), (7,), (1, 2, 3, 4) * 5, tuple(range(30, 60))]
        done = tokens(plain, *(request(str(index), prompt, 50) for index, prompt in enumerate(prompts)))
        texts = [(*prompt, *done[str(index)]) for index, prompt in enumerate(prompts)]
        return save_distilled_head(models / f"{kind}_head", models / kind, texts)

    return make


@pytest.fixture(scope="session")
def new_engine(models: Path, head_of: Callable[[str], str]) -> Callable[..., Engine]:
    """ahead: steps are padded and run one ahead of the host, as on a GPU."""

    def make(kind: str = "llama", *, ahead: bool = False, **changes: Any) -> Engine:
        target, draft = str(models / kind), str(models / f"{kind}_draft")
        if changes.get("drafter") in ("ngram", "none"):
            changes = {"draft": None} | changes
        if changes.get("drafter") == "eagle3" and "draft" not in changes:
            draft = head_of(kind)
        settings: dict[str, Any] = {
            "target": target,
            "draft": draft,
            "max_batch": 4,
            "prefill_chunk_tokens": 8,
        } | changes
        with mock.patch.object(placement, "runs_ahead", return_value=ahead):
            return Engine(EngineConfig(**settings))

    return make
