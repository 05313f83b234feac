"""What the target's own layer for multi-token prediction drafts is what transformers' module for such layers
gives for the whole sequence, from the same files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import FinishedRequest
from driftguard_engine.engine import Engine
from driftguard_engine.models.target_mtp import FAMILIES, TargetMtp, TargetMtpModel
from torch import Tensor

from tests.engine.core.planted import stale_features
from tests.engine.core.target_mtps import OfTarget, save_with_mtp
from tests.engine.core.tiny import request, serve
from tests.engine.drafters.watched import Drafted, check, traffic


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("with_mtp")
    for kind in FAMILIES:
        save_with_mtp(root / kind, kind, copies=kind != "glm4_moe_lite", shards=kind == "glm4_moe")
    return root


def engine_of(directory: Path, **changes: Any) -> Engine:
    settings: dict[str, Any] = {"max_batch": 3, "prefill_chunk_tokens": 8} | changes
    return Engine(EngineConfig(str(directory), drafter="mtp", **settings))


@pytest.mark.parametrize("kind", FAMILIES)
def test_each_draft_is_drawn_from_what_the_layer_gives_for_the_whole_sequence(
    directories: Path, drafted: list[Drafted], kind: str
) -> None:
    serve(engine_of(directories / kind), *traffic()[1::3])
    check(drafted, OfTarget(directories / kind), least=50)


def test_a_prompt_that_begins_like_another_is_gone_on_with(directories: Path, drafted: list[Drafted]) -> None:
    """In the slot of the other and in another one."""
    engine, shared = engine_of(directories / "deepseek_v3"), tuple(range(40, 64))
    prompts = [(*shared[:length], *behind) for length in (16, 24) for behind in ((1, 2), (3, 4))]
    done: dict[str, FinishedRequest] = {}
    for index, prompt in enumerate(prompts):  # one after another: in the slot that holds the beginning
        done |= serve(engine, request(f"a{index}", prompt, 5))
    done |= serve(engine, *(request(f"b{index}", prompt, 5) for index, prompt in enumerate(prompts)))
    assert {each.reused_prompt_tokens for each in done.values()} >= {0, 16, 24}
    check(drafted, OfTarget(directories / "deepseek_v3"), least=40)


def hidden_states_first(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = TargetMtp.fill

    def swapped(self: TargetMtp, *given: Any) -> None:
        fill(self, *given)
        self.fuse.weight = torch.nn.Parameter(torch.cat(self.fuse.weight.chunk(2, 1)[::-1], 1))

    monkeypatch.setattr(TargetMtp, "fill", swapped)


def norms_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = TargetMtp.fill

    def swapped(self: TargetMtp, *given: Any) -> None:
        fill(self, *given)
        self.token_norm, self.state_norm = self.state_norm, self.token_norm

    monkeypatch.setattr(TargetMtp, "fill", swapped)


def chained_without_the_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's glm4_moe_mtp chains."""
    forward, predict = TargetMtp.forward, TargetMtpModel.predict

    def not_normed(self: TargetMtp, *given: Any) -> Tensor:
        norm, self.output_norm = self.output_norm, torch.nn.Identity()
        found = forward(self, *given)
        self.output_norm = norm
        return found

    def norm_first(self: TargetMtpModel, output: Tensor) -> tuple[Tensor, Tensor]:
        return predict(self, self._head.output_norm(output))[0], output

    monkeypatch.setattr(TargetMtp, "forward", not_normed)
    monkeypatch.setattr(TargetMtpModel, "predict", norm_first)


def experts_in_another_order(monkeypatch: pytest.MonkeyPatch) -> None:
    fill = TargetMtp.fill

    def turned(self: TargetMtp, *given: Any) -> None:
        fill(self, *given)
        experts: Any = self.layer.mlp.experts
        experts.down_proj = torch.nn.Parameter(experts.down_proj.flip(0))

    monkeypatch.setattr(TargetMtp, "fill", turned)


@pytest.mark.parametrize(
    "plant",
    [
        hidden_states_first,
        norms_swapped,
        chained_without_the_norm,
        experts_in_another_order,
        stale_features,
    ],
)
def test_what_is_computed_wrongly_is_noticed(
    directories: Path,
    drafted: list[Drafted],
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """The checks above catch each; without a defect the same traffic passes there."""
    plant(monkeypatch)
    serve(engine_of(directories / "deepseek_v3"), *traffic()[:6])
    with pytest.raises(AssertionError, match="not close"):
        check(drafted, OfTarget(directories / "deepseek_v3"), least=40)
