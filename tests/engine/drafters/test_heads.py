"""What heads of other kinds than EAGLE-3 draft is what they give for the whole sequence."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from driftguard_engine.decode import placement
from driftguard_engine.drafters.heads import ParallelDrafter
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.models.chain_heads import ParallelModel
from transformers import Qwen3Config

from tests.engine.core.eagle3_heads import load_target
from tests.engine.core.heads import KINDS, reference_of, save_random
from tests.engine.core.tiny import request, serve
from tests.engine.drafters.watched import Drafted, check, engine_of, traffic

PRUNED = [each for each in range(257) if each % 4]
HEADS: list[tuple[str, dict[str, Any]]] = [
    ("eagle", {}),
    ("eagle", {"norms": True, "bias": True}),
    ("mtp", {}),
    ("mtp", {"layer": Qwen3Config}),
    ("peagle", {"token_ids": PRUNED, "norm_before_fc": True}),
    ("peagle", {"layers": 2, "features": (1, 2, 4), "fc_norm": True, "norm_before_residual": True}),
    ("peagle", {"unembeds": False}),
    ("dflash", {"token_ids": PRUNED, "features": (1, 2, 4)}),
    ("dflash", {"block": 9, "layers": 1, "drafts_at_first": True}),
    ("dspark", {"token_ids": PRUNED}),
    ("dspark", {"markov_kind": "gated"}),
    ("dspark", {"markov_kind": "rnn"}),
    ("dspark", {"markov_kind": "rnn", "drafts_at_first": False}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "settings"), HEADS, ids=str)
def test_each_draft_is_drawn_from_what_the_head_gives_for_the_whole_sequence(
    targets: Path, tmp_path: Path, drafted: list[Drafted], kind: str, settings: dict[str, Any]
) -> None:
    target = load_target(targets / "llama")
    save_random(tmp_path / "head", kind, target, **settings)
    alike = [request(f"alike{index}", (9,) * 20, 6) for index in range(2)]
    some = traffic()[:6] + traffic()[7::3]
    serve(engine_of(targets / "llama", tmp_path / "head", kind), *some, *alike)
    check(drafted, reference_of(tmp_path / "head", target))


@pytest.mark.parametrize(
    ("target_kind", "path", "ahead"), [("llama", "generic", True), ("gpt2", "auto", False)]
)
@pytest.mark.parametrize("kind", ["mtp", "dspark"])
def test_every_kind_of_target_gives_the_features(
    targets: Path,
    tmp_path: Path,
    drafted: list[Drafted],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    target_kind: str,
    path: str,
    ahead: bool,
) -> None:
    target = load_target(targets / target_kind)
    save_random(tmp_path / "head", kind, target)
    monkeypatch.setattr(placement, "runs_ahead", lambda _: ahead)
    serve(engine_of(targets / target_kind, tmp_path / "head", kind, model_path=path), *traffic()[1::2])
    check(drafted, reference_of(tmp_path / "head", target))


def masks_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted places stay as they were read with the mask."""
    draft = ParallelDrafter.draft

    def leave(self: ParallelDrafter, rows: RowState, *given: Any) -> None:
        draft(self, rows, *given)
        for slot, count in zip(rows.slots.tolist(), rows.drafted.tolist(), strict=True):
            if slot in self._read:
                self._read[slot] += max(count - 1, 0)

    monkeypatch.setattr(ParallelDrafter, "draft", leave)


def not_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Places behind the newest token are read with whatever was kept there."""
    monkeypatch.setattr(ParallelModel, "mask", lambda *_: None)


@pytest.mark.parametrize(
    ("kind", "plant"),
    [
        ("peagle", masks_left),
        ("peagle", not_masked),
    ],
)
def test_what_is_read_wrongly_is_noticed(
    targets: Path,
    tmp_path: Path,
    drafted: list[Drafted],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    plant: Callable[[pytest.MonkeyPatch], None],
) -> None:
    """The checks above catch each; without a defect the same traffic passes there."""
    plant(monkeypatch)
    target = load_target(targets / "llama")
    save_random(tmp_path / "head", kind, target)
    serve(engine_of(targets / "llama", tmp_path / "head", kind), *traffic()[:8])
    with pytest.raises(AssertionError, match=r"not close|drafts are missing"):
        check(drafted, reference_of(tmp_path / "head", target))


def test_all_kinds_are_tested() -> None:
    assert {kind for kind, _ in HEADS} == set(KINDS)
