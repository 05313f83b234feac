"""What heads draft where no step waits for a value, as on a GPU, is what they give for the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driftguard_engine.decode import placement
from driftguard_engine.drafters.heads import ChainDrafter
from driftguard_engine.drafters.hybrid import HybridDrafter
from driftguard_engine.engine import Engine
from driftguard_engine.kernels.backend import Backend
from driftguard_engine.models.chain_heads import Eagle3Model, LeanChainModel
from torch import Tensor
from transformers import Qwen3Config

from tests.engine.core.eagle3_heads import Reference, load_target, save_random_head
from tests.engine.core.heads import reference_of, save_random
from tests.engine.core.tiny import drain, finished, request, serve, tokens
from tests.engine.drafters.test_eagle3 import without_speculation_for_a_while
from tests.engine.drafters.watched import PROMPTS, Drafted, check, engine_of, traffic
from tests.engine.kernels.emulated import SOURCES, Emulated
from tests.engine.simt.emulator import Module

PRUNED = [each for each in range(257) if each % 4]
HEADS: list[tuple[str, dict[str, Any]]] = [
    ("eagle3", {"norm_before_fc": True, "norm_output": True}),
    ("eagle3", {"norm_before_fc": True, "norm_output": True, "head_dim": 16}),  # kernels compute its layer
    ("eagle3", {"fc_norm": True, "norm_before_residual": True, "embeds": True, "qwen3": True}),
    ("eagle", {}),
    ("mtp", {"layer": Qwen3Config}),
    ("peagle", {"layers": 2, "features": (1, 2, 4), "token_ids": PRUNED}),
]


@pytest.fixture
def queued_engine(compiled: Callable[..., Module], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    """As `engine_of`; the kernels run in the emulator."""
    launcher = Emulated(compiled(*SOURCES))
    monkeypatch.setattr(placement, "backend_of", lambda _: Backend(launcher))
    monkeypatch.setattr(placement, "runs_ahead", lambda _: True)
    return engine_of


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "settings"), HEADS, ids=range(len(HEADS)))
def test_each_draft_is_drawn_from_what_the_head_gives_for_the_whole_sequence(
    targets: Path,
    tmp_path: Path,
    drafted: list[Drafted],
    queued_engine: Callable[..., Engine],
    kind: str,
    settings: dict[str, Any],
) -> None:
    target, head = load_target(targets / "llama"), tmp_path / "head"
    if kind == "eagle3":
        save_random_head(head, target, PRUNED, (1, 2, 4), **settings)
    else:
        save_random(head, kind, target, **settings)
    engine = queued_engine(targets / "llama", head, kind)
    drafter = engine._drafts.drafter
    assert isinstance(drafter, ChainDrafter)
    assert drafter.captured
    assert (drafter._model.kernels_obstacle is None) == ("head_dim" in settings)
    alike = [request(f"alike{index}", (9,) * 20, 6) for index in range(2)]
    done = serve(engine, *traffic()[:4], *traffic()[5::3], *alike, request("one", (5, 6), 1))
    assert {each.finish_reason for each in done.values()} == {"length"}
    check(drafted, Reference(head, target) if kind == "eagle3" else reference_of(head, target))


@pytest.mark.parametrize("drafter", ["eagle3", "hybrid"])
def test_a_head_without_usable_logits_is_reported(
    targets: Path,
    distilled: Path,
    queued_engine: Callable[..., Engine],
    caplog: pytest.LogCaptureFixture,
    drafter: str,
) -> None:
    engine = queued_engine(targets / "llama", distilled, drafter)
    expected = tokens(engine_of(targets / "llama", None, "none"), request("r", (7,), 12))
    assert tokens(engine, request("r", (7,), 12)) == expected
    assert "no usable logits" not in caplog.text  # a request of one token gets no drafts at first
    head = engine._drafts.drafter
    chain = head.model if isinstance(head, HybridDrafter) else head
    assert isinstance(chain, ChainDrafter)
    assert isinstance(chain._model, Eagle3Model)
    chain._model._norm.weight.fill_(torch.nan)
    assert tokens(engine, request("r", (7,), 12)) == expected
    assert "no usable logits" in caplog.text


def steps_of_all_kinds(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of sequences that begin like others, and of one that leaves; some steps draft nothing. How many kept
    none, one, two, ... of their drafts."""
    without_speculation_for_a_while(engine, monkeypatch)
    engine.submit(request("gone", range(20), 30))
    for _ in range(4):
        engine.step()
    engine.abort("gone")
    for name, prompt in PROMPTS.items():
        engine.submit(request(name, prompt, 30))
    for index, behind in enumerate(((1, 2), (3,), (5,) * 9)):
        engine.submit(request(f"alike{index}", (*range(40, 56), *behind), 8))
    done = finished(drain(engine)).values()
    return [sum(column) for column in zip(*(each.counts.acceptance_histogram for each in done), strict=True)]


def unread(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the target has read is kept, and not read by the head."""
    decode = LeanChainModel.decode

    def only_drafts(self: LeanChainModel, token_ids: Tensor, *given: Any) -> Tensor:
        if len(given) == 2:  # no draft is drawn from it
            return torch.empty(0)
        return decode(self, token_ids, *given)

    monkeypatch.setattr(LeanChainModel, "decode", only_drafts)


def read_with_the_next_but_one(monkeypatch: pytest.MonkeyPatch) -> None:
    observe = ChainDrafter.observe

    def shifted(self: ChainDrafter, rows: Any, *given: Any) -> None:
        rows.fed.copy_(rows.fed.roll(-1, 1))
        observe(self, rows, *given)

    monkeypatch.setattr(ChainDrafter, "observe", shifted)


def kept_from_the_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted places keep the head's own outputs."""
    monkeypatch.setattr(ChainDrafter, "observe", lambda *_: None)


@pytest.mark.parametrize("plant", [None, unread, read_with_the_next_but_one, kept_from_the_draft])
def test_what_is_read_wrongly_is_noticed(
    targets: Path,
    distilled: Path,
    drafted: list[Drafted],
    queued_engine: Callable[..., Engine],
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None] | None,
) -> None:
    """Each is caught; without a defect the same traffic passes."""
    if plant is not None:
        plant(monkeypatch)
    kept = steps_of_all_kinds(queued_engine(targets / "llama", distilled, "eagle3"), monkeypatch)
    reference = Reference(distilled, load_target(targets / "llama"))
    if plant is None:
        assert all(kept[:4]), kept
        check(drafted, reference)
        return
    with pytest.raises(AssertionError, match=r"not close|drafts are missing"):
        check(drafted, reference)
