from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from driftguard_engine.config import EngineConfig
from driftguard_engine.drafters.heads import BlockDrafter, ChainDrafter, ParallelDrafter
from driftguard_engine.engine import Engine
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.speculation import Verification

from tests.engine.core.eagle3_heads import save_distilled_head
from tests.engine.core.tiny import request, save, serve
from tests.engine.drafters.watched import PROMPTS, Drafted


@pytest.fixture
def drafted(monkeypatch: pytest.MonkeyPatch) -> list[Drafted]:
    """All drafts of all steps from here on."""
    seen: list[Drafted] = []

    def watch(draft: Any, self: Any, rows: RowState, verification: Verification, launcher: Any) -> None:
        asked = rows.drafted.tolist()
        draft(self, rows, verification, launcher)
        for row, (slot, length, count) in enumerate(
            zip(rows.slots.tolist(), rows.lengths.tolist(), rows.drafted.tolist(), strict=True)
        ):
            seen.append(
                Drafted(
                    rows.state.token_ids[slot, :length].tolist(),
                    asked[row],
                    verification.draft_tokens[row, :count].tolist(),
                    verification.draft_logits[row, :count].clone(),
                )
            )

    def watched(draft: Any) -> Any:
        return lambda *given: watch(draft, *given)

    for kind in (ChainDrafter, ParallelDrafter, BlockDrafter):
        monkeypatch.setattr(kind, "draft", watched(kind.draft))
    return seen


@pytest.fixture(scope="session")
def targets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("targets")
    save(root / "llama", seed=3, num_hidden_layers=5)
    for kind in ("gpt2", "odd_llama"):
        save(root / kind, kind, seed=3)
    return root


@pytest.fixture(scope="session")
def distilled(tmp_path_factory: pytest.TempPathFactory, targets: Path) -> Path:
    """For the llama: of its answers to PROMPTS it drafts much right."""
    plain = Engine(EngineConfig(str(targets / "llama"), drafter="none"))
    done = serve(plain, *(request(name, prompt, 40) for name, prompt in PROMPTS.items()))
    texts = [(*PROMPTS[name], *each.output_token_ids) for name, each in done.items()]
    return Path(save_distilled_head(tmp_path_factory.mktemp("heads") / "head", targets / "llama", texts))
