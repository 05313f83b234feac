"""Trees in the engine: greedy output, the target's law, what drafters are told; mistakes are caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import InvalidModel
from driftguard_engine.drafters.factory import DraftLoader
from driftguard_engine.kv_cache import SlotCache, Span
from driftguard_engine.models.generic import GenericModel
from driftguard_engine.models.llama import LlamaModel
from driftguard_engine.speculation import TreeVerification

from tests.engine.core.tiny import (
    new_module,
    plain_greedy,
    request,
    serve,
)
from tests.engine.core.tree_drafters import AnswerTree, tree_engine

PROMPTS = {"a": (7,), "b": (1, 2, 3, 4) * 5, "c": tuple(range(30, 60))}


def answers(kind: str) -> dict[tuple[int, ...], tuple[int, ...]]:
    return {prompt: plain_greedy(kind, prompt, 40) for prompt in PROMPTS.values()}


def greedy_answers_differ(target: str, kind: str, path: str = "auto", least_accepted: int = 0) -> bool:
    engine = tree_engine(
        target, AnswerTree(answers(kind)), max_batch=4, prefill_chunk_tokens=8, model_path=path
    )
    asked = [
        request(f"{name}{k}", prompt, 40, num_speculative_tokens=k)
        for name, prompt in PROMPTS.items()
        for k in (0, 1, 3, 8)
    ]
    done = serve(engine, *asked)
    assert {each.verification for each in done.values()} == {"token", "tree"}
    assert all(each.counts.accepted <= each.counts.drafted for each in done.values())
    assert sum(each.counts.accepted for each in done.values()) >= least_accepted
    return any(
        each.output_token_ids != answers(kind)[each.request.prompt_token_ids] for each in done.values()
    )


@pytest.mark.parametrize(
    ("kind", "path"), [("llama", "auto"), ("llama", "generic"), ("gpt2", "auto"), ("odd_llama", "auto")]
)
def test_greedy_output_is_plain_greedy_decoding(models: Path, kind: str, path: str) -> None:
    # Of 40 tokens in steps of at most 2, 4 and 9: every draft is accepted.
    assert not greedy_answers_differ(str(models / kind), kind, path, least_accepted=3 * (20 + 30 + 35))


def sibling_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Span, "seen", lambda self: torch.ones(self.count, self.count).tril().bool())


def ancestor_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Span, "seen", lambda self: torch.eye(self.count, dtype=torch.bool))


def positions_one_after_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Span, "positions", property(lambda self: range(self.start, self.end)))


def positions_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    positions = Span.positions.fget  # type: ignore[attr-defined]

    def later(self: Span) -> list[int]:
        first, *others = positions(self)
        return [first, *(each + (self.parents is not None) for each in others)]

    monkeypatch.setattr(Span, "positions", property(later))


def keys_of_rejected_nodes_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotCache, "keep", lambda *_: None)


@pytest.mark.parametrize(
    "mistake",
    [
        sibling_visible,
        ancestor_hidden,
        positions_one_after_another,
        positions_off_by_one,
        keys_of_rejected_nodes_kept,
    ],
)
def test_a_mistake_changes_greedy_output(
    models: Path, mistake: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mistake(monkeypatch)
    assert greedy_answers_differ(str(models / "llama"), "llama")


def told_is_what_was_kept(models: Path, path: str) -> bool:
    """Features of the newest token and of the kept nodes, and what the target reads at the probe, against
    transformers' own forward over the whole text."""
    module = new_module("llama", seed=3, vocabulary=257)
    drafter = AnswerTree(answers("llama"), layers=(1, 2))
    engine = tree_engine(str(models / "llama"), drafter, model_path=path, max_batch=1)
    for name, prompt in PROMPTS.items():
        drafter.told.clear()
        serve(engine, request(name, prompt, 12, num_speculative_tokens=3))
        text = torch.tensor([[*prompt, *answers("llama")[prompt]]])
        with torch.inference_mode():
            # The last hidden states of transformers are normalised.
            whole = module(text, output_hidden_states=True)
        hidden = torch.cat([whole.hidden_states[1][0], whole.hidden_states[2][0]], -1)
        for rows, tree, outcome in drafter.told:
            start, accepted = int(rows.starts[0]), int(outcome.accepted[0])
            assert outcome.features is not None
            assert outcome.probe_features is not None
            kept = hidden[start : start + accepted + 1]
            if not torch.allclose(outcome.features[0, : accepted + 1], kept, atol=1e-4):
                return False
            if tree.probes and int(tree.tokens[0, tree.probes[0]]) >= 0:
                assert torch.allclose(outcome.probe_logits[0, 0], whole.logits[0, start + 1], atol=1e-3)
                assert torch.allclose(outcome.probe_features[0, 0], hidden[start + 1], atol=1e-4)
            columns = outcome.path[0, :accepted].tolist()
            assert tree.tokens[0, columns].tolist() == text[0, start + 1 :][:accepted].tolist()
        assert sum(int(outcome.accepted) for *_, outcome in drafter.told) > 6
    return True


@pytest.mark.parametrize("path", ["auto", "generic"])
def test_a_drafter_is_told_the_kept_nodes_and_its_probes(models: Path, path: str) -> None:
    assert told_is_what_was_kept(models, path)


def test_features_of_rejected_nodes_are_caught(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = TreeVerification.verify

    def first_nodes(self: TreeVerification, logits: torch.Tensor) -> Any:
        found = verify(self, logits)
        return replace(found, places=np.arange(found.places.shape[1])[np.newaxis] * (found.places > 0))

    monkeypatch.setattr(TreeVerification, "verify", first_nodes)
    assert not told_is_what_was_kept(models, "auto")


def test_a_tree_is_read_up_to_the_end_of_the_slot(models: Path) -> None:
    prompt = PROMPTS["b"]
    engine = tree_engine(str(models / "llama"), AnswerTree(answers("llama")), max_batch=2, max_length=31)
    done = serve(engine, *(request(name, prompt, 11, num_speculative_tokens=8) for name in "xy"))
    assert {each.output_token_ids for each in done.values()} == {answers("llama")[prompt][:11]}


def loader_of(model: Any, verification: Any = "token") -> DraftLoader:
    config = EngineConfig("target", drafter="none", verification=verification)
    target = type("Loaded", (), {"model": model})()
    return DraftLoader(config, target, None, None)  # type: ignore[arg-type]


def test_a_target_that_cannot_read_trees_is_named() -> None:
    sees_little = new_module("mistral", seed=1, vocabulary=50, sliding_window=4)
    local = new_module(
        "gpt_neo",
        seed=1,
        vocabulary=50,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=8,
    )
    no_positions = new_module("gpt2", seed=1, vocabulary=50)
    forward = no_positions.forward
    no_positions.forward = lambda *given, position_ids, **others: forward(
        *given,
        position_ids=torch.arange(position_ids.shape[1])[None] + position_ids[0, 0],
        **others,
    )
    no_mask = new_module("gpt2", seed=1, vocabulary=50)

    def refuse(*given: Any, attention_mask: Any = None, **others: Any) -> Any:
        if attention_mask is not None:
            raise TypeError("one mask of two dimensions")
        return type(no_mask).forward(no_mask, *given, **others)

    no_mask.forward = refuse
    for module, why in (
        (sees_little, "limits how far its layers see"),
        (local, "limits how far its layers see"),
        (no_positions, "does not place tokens by position ids alone"),
        (no_mask, r"takes no mask of four dimensions \(TypeError: one mask"),
    ):
        with pytest.raises(InvalidModel, match=f"draft: X drafts trees, .* cannot read: .*{why}"):
            loader_of(GenericModel(module, 1, 40)).check_takes_trees("draft: X", field="draft")


def test_trees_are_not_verified_by_blocks() -> None:
    model = LlamaModel(new_module("llama", seed=1, vocabulary=50), 1, 40)
    loader_of(model).check_takes_trees("draft: X", field="draft")
    with pytest.raises(InvalidModel, match="a rule of their own, and not by 'block'"):
        loader_of(model, "block").check_takes_trees("draft: X", field="draft")
