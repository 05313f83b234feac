"""What an EAGLE-3 head drafts is what it gives for the whole sequence, whatever happened on the way."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
from driftguard_engine.core import FinishedRequest
from driftguard_engine.decode import placement
from driftguard_engine.drafters.heads import ChainDrafter
from driftguard_engine.engine import Engine
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.models.base import Features
from driftguard_engine.models.chain_heads import LeanChainModel
from driftguard_engine.speculation import Verification
from torch import Tensor

from tests.engine.core.eagle3_heads import Reference, load_target, save_random_head
from tests.engine.core.tiny import drain, finished, request, serve
from tests.engine.drafters.watched import PROMPTS, Drafted, check, engine_of, traffic


def eagle3_engine(target: Path, head: Path, **changes: Any) -> Engine:
    return engine_of(target, head, "eagle3", **changes)


HEADS: list[dict[str, bool]] = [
    {},
    {"norm_before_fc": True, "norm_output": True},
    {"fc_norm": True, "norm_before_residual": True},
    {"embeds": True, "qwen3": True},
]


@pytest.mark.parametrize("norms", HEADS, ids=str)
def test_each_draft_is_drawn_from_what_the_head_gives_for_the_whole_sequence(
    targets: Path, tmp_path: Path, drafted: list[Drafted], norms: dict[str, bool]
) -> None:
    target = load_target(targets / "llama")
    pruned = [each for each in range(257) if each % 4]
    save_random_head(tmp_path / "head", target, pruned, (1, 2, 4), **norms)
    serve(eagle3_engine(targets / "llama", tmp_path / "head"), *traffic())
    check(drafted, Reference(tmp_path / "head", target))


@pytest.mark.parametrize(
    ("kind", "path", "ahead"),
    [
        ("llama", "auto", True),
        ("llama", "generic", False),
        ("gpt2", "auto", True),
        ("odd_llama", "auto", False),
    ],
)
def test_every_kind_of_target_gives_the_features_and_its_output_layer(
    targets: Path,
    tmp_path: Path,
    drafted: list[Drafted],
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    path: str,
    ahead: bool,
) -> None:
    target = load_target(targets / kind)
    save_random_head(tmp_path / "head", target, range(257), (0, 1), unembeds=False)
    monkeypatch.setattr(placement, "runs_ahead", lambda _: ahead)
    serve(eagle3_engine(targets / kind, tmp_path / "head", model_path=path), *traffic())
    check(drafted, Reference(tmp_path / "head", target))


def test_accepted_drafts_are_read_again_with_the_targets_own_features(
    targets: Path, distilled: Path, drafted: list[Drafted]
) -> None:
    """Steps that keep none, one, two and three of their drafts."""
    engine = eagle3_engine(targets / "llama", distilled)
    done = serve(engine, *(request(name, prompt, 40) for name, prompt in PROMPTS.items()))
    histograms = (each.counts.acceptance_histogram for each in done.values())
    kept = [sum(column) for column in zip(*histograms, strict=True)]
    assert all(kept[:4]), kept
    check(drafted, Reference(distilled, load_target(targets / "llama")))


def without_speculation_for_a_while(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every second step drafts nothing, and so may steps in a row."""
    counts, steps = engine._draft_counts, iter(range(10_000))

    def some(rows: list[Any], *, alone: bool) -> list[int]:
        step = next(steps)
        return [count * (step % 5 in (0, 3)) for count in counts(rows, alone=alone)]

    monkeypatch.setattr(engine, "_draft_counts", some)


def test_what_was_decoded_without_drafts_is_read_before_the_next(
    targets: Path, distilled: Path, drafted: list[Drafted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As adaptive K does where speculation does not pay."""
    engine = eagle3_engine(targets / "llama", distilled)
    without_speculation_for_a_while(engine, monkeypatch)
    asked = [
        request(f"{name}{seed}", prompt, 30, seed=seed) for name, prompt in PROMPTS.items() for seed in (0, 1)
    ]
    serve(engine, *asked)
    check(drafted, Reference(distilled, load_target(targets / "llama")))


def test_a_prompt_that_begins_like_another_is_gone_on_with(
    targets: Path, distilled: Path, drafted: list[Drafted]
) -> None:
    """In the slot of the other and in another one, at each place of the next token's own."""
    engine, shared = eagle3_engine(targets / "llama", distilled), tuple(range(40, 64))
    prompts = [(*shared[:length], *behind) for length in (16, 24) for behind in ((1, 2), (3, 4), (5,) * 11)]
    done: dict[str, FinishedRequest] = {}
    for index, prompt in enumerate(prompts * 2):  # one after another: in the slot that holds the beginning
        done |= serve(engine, request(f"a{index}", prompt, 8))
    done |= serve(engine, *(request(f"b{index}", prompt, 8) for index, prompt in enumerate(prompts)))
    assert {each.reused_prompt_tokens for each in done.values()} >= {0, 16, 24}
    check(drafted, Reference(distilled, load_target(targets / "llama")))


def test_an_aborted_request_leaves_nothing_to_the_next_in_its_slot(
    targets: Path, distilled: Path, drafted: list[Drafted]
) -> None:
    engine = eagle3_engine(targets / "llama", distilled, max_batch=1)
    for index in range(6):
        engine.submit(request(f"gone{index}", range(index, index + 20), 30))
        for _ in range(index + 2):
            engine.step()
        engine.abort(f"gone{index}")
        for prompt in ((7,), (5, 6), (1, 2, 3)):
            engine.submit(request(f"{index}{prompt}", prompt, 6))
        assert not [each for each in finished(drain(engine)).values() if each.finish_reason == "error"]
    check(drafted, Reference(distilled, load_target(targets / "llama")))


def chain_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accepted places stay as the chain of drafts wrote them, from the head's own outputs."""
    draft = ChainDrafter.draft

    def keep(self: ChainDrafter, rows: RowState, verification: Verification, launcher: Any) -> None:
        draft(self, rows, verification, launcher)
        for slot, count in zip(rows.slots.tolist(), rows.drafted.tolist(), strict=True):
            if slot in self._read:
                self._read[slot] += max(count - 2, 0)

    monkeypatch.setattr(ChainDrafter, "draft", keep)


def never_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next request in a slot begins where the last one ended."""
    monkeypatch.setattr(ChainDrafter, "forget", lambda *_: None)


def copied_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last place of a prefix that was copied in parts was read for another token, or not at all."""
    monkeypatch.setattr(ChainDrafter, "copy", lambda self, *given: self._model.copy(*given))


def unread_beginning(monkeypatch: pytest.MonkeyPatch) -> None:
    """The place before a chunk is not read with the chunk's first token."""
    read = LeanChainModel.read

    def without_first(
        self: LeanChainModel, token_ids: Any, spans: Any, hidden: Tensor | None = None
    ) -> Tensor:
        return read(self, [7, *token_ids[1:]] if hidden is None else token_ids, spans, hidden)

    monkeypatch.setattr(LeanChainModel, "read", without_first)


DEFECTS = [
    chain_kept,
    never_forgotten,
    copied_as_it_is,
    unread_beginning,
]


@pytest.mark.parametrize("plant", [None, *DEFECTS])
def test_what_is_read_wrongly_is_noticed(
    targets: Path,
    distilled: Path,
    drafted: list[Drafted],
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None] | None,
) -> None:
    """The checks above catch each; without a defect the same traffic passes."""
    if plant is not None:
        plant(monkeypatch)
    alike = [request(f"alike{index}", (9,) * 30, 6) for index in range(3)]
    serve(eagle3_engine(targets / "llama", distilled), *traffic(), *alike)
    reference = Reference(distilled, load_target(targets / "llama"))
    if plant is None:
        check(drafted, reference)
        return
    with pytest.raises(AssertionError, match=r"not close|drafts are missing"):
        check(drafted, reference)


def test_a_target_is_asked_for_its_layers_only_where_a_drafter_reads_them(
    targets: Path, distilled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Collection[int]] = []
    make = Features.__init__

    def watch(self: Features, layers: Collection[int]) -> None:
        made.append(layers)
        make(self, layers)

    monkeypatch.setattr(Features, "__init__", watch)
    engine = eagle3_engine(targets / "llama", distilled)
    serve(engine, request("plain", range(20), num_speculative_tokens=0))
    assert not made
    serve(engine, request("r", range(20)))
    assert {layer for layers in made for layer in layers} == {0, 1}
