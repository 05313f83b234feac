"""Medusa heads in the engine: what they guess, greedy output, the target's law, reuse, swaps and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driftguard_engine.config import EngineConfig, InvalidConfig
from driftguard_engine.core import InvalidModel
from driftguard_engine.decode.placement import placement_of
from driftguard_engine.drafters.medusa import MedusaDrafter
from driftguard_engine.engine import Engine
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.models.device_memory import ModelMemory
from driftguard_engine.models.medusa_head import is_medusa
from driftguard_engine.speculation import TreeVerification
from driftguard_training.medusa import WEIGHTS
from safetensors.torch import load_file, save_file

from tests.engine.core.eagle3_heads import load_target
from tests.engine.core.medusa_heads import TREE, save_random_heads
from tests.engine.core.tiny import plain_greedy, request, serve

PROMPTS = {"a": (7,), "b": (1, 2, 3, 4) * 5, "c": tuple(range(30, 60))}


@pytest.fixture(scope="module")
def heads_of(models: Path) -> Callable[[str], str]:
    """Directories of random heads for the models of each kind; of gpt2 with output layers of their own."""

    def make(kind: str) -> str:
        directory, hidden = models / f"{kind}_medusa", 33 if kind == "gpt2" else 32
        if directory.exists():
            return str(directory)
        return save_random_heads(directory, hidden, 257, layers=2, owns_output=kind == "gpt2")

    return make


def engine_of(models: Path, kind: str, heads: str, **settings: Any) -> Engine:
    settings = {"max_batch": 4, "prefill_chunk_tokens": 8} | settings
    return Engine(EngineConfig(str(models / kind), heads, "medusa", **settings))


def guesses_are_those_of_the_heads(
    models: Path, heads: str, monkeypatch: pytest.MonkeyPatch, kind: str = "llama", path: str = "auto"
) -> bool:
    """Of every step, against transformers' hidden states of the whole text and the formula of a head; the
    output is plain greedy decoding, whatever they are."""
    module, weights = load_target(models / kind), load_file(Path(heads) / WEIGHTS)
    drafted: list[tuple[tuple[int, ...], list[int]]] = []
    draft_tree = MedusaDrafter.draft_tree

    def recorded(self: MedusaDrafter, rows: RowState, tree: TreeVerification) -> None:
        draft_tree(self, rows, tree)
        for row, (slot, length) in enumerate(zip(rows.slots.tolist(), rows.lengths.tolist(), strict=True)):
            text = tuple(rows.state.token_ids[slot, :length].tolist())
            drafted.append((text, tree.tokens[row].tolist()))

    with monkeypatch.context() as patched:
        patched.setattr(MedusaDrafter, "draft_tree", recorded)
        engine = engine_of(models, kind, heads, model_path=path)
        asked = [
            request(f"{name}{k}", PROMPTS[name], 30, num_speculative_tokens=k)
            for name in PROMPTS
            for k in (2, 6)
        ]
        done = serve(engine, *asked)
    for each in done.values():
        assert each.output_token_ids == plain_greedy(kind, each.request.prompt_token_ids, 30)
        assert each.verification == "tree"
    assert any(set(tokens) == {-1} for text, tokens in drafted if len(text) == 1)
    for text, found in drafted:
        if len(text) == 1:
            continue
        with torch.inference_mode():
            state = module(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0, -2]
            expected: list[int] = []
            for depth in range(4):
                made = state
                for layer in range(2):
                    name = f"{depth}.{layer}.linear"
                    made = made + torch.nn.functional.silu(
                        weights[f"{name}.weight"] @ made + weights[f"{name}.bias"]
                    )
                output = weights.get(f"{depth}.2.weight", module.lm_head.weight)
                best = (output @ made).topk(3).indices.tolist()
                expected += [best[path[-1]] for path in TREE if len(path) == depth + 1]
        there = [(token, right) for token, right in zip(found, expected, strict=False) if token >= 0]
        if any(token != right for token, right in there):
            return False
    assert kind == "gpt2" or sum(each.counts.accepted for each in done.values()) > 5
    return True


@pytest.mark.parametrize(("kind", "path"), [("llama", "auto"), ("llama", "generic"), ("gpt2", "auto")])
def test_each_step_guesses_what_the_heads_say_of_the_targets_last_hidden_state(
    models: Path, heads_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, kind: str, path: str
) -> None:
    assert guesses_are_those_of_the_heads(models, heads_of(kind), monkeypatch, kind, path)


def test_children_in_another_order_are_caught(
    models: Path, heads_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    guess = TreeVerification.guess

    def turned(self: TreeVerification, tokens: torch.Tensor, parents: Any) -> range:
        return guess(self, tokens.flip(1), parents)

    monkeypatch.setattr(TreeVerification, "guess", turned)
    assert not guesses_are_those_of_the_heads(models, heads_of("llama"), monkeypatch)


def changed_heads(directory: Path, heads: str, tensors: Any = None, config: Any = None) -> str:
    directory.mkdir()
    told = json.loads((Path(heads) / "config.json").read_text()) | (config or {})
    (directory / "config.json").write_text(json.dumps(told))
    found = load_file(Path(heads) / WEIGHTS)
    save_file(found if tensors is None else tensors(found), directory / "model.safetensors")
    return str(directory)


def test_what_does_not_fit_is_refused_by_name(
    models: Path, heads_of: Callable[[str], str], tmp_path: Path
) -> None:
    heads = heads_of("llama")

    def without(name: str) -> Callable[[Any], Any]:
        return lambda found: {each: value for each, value in found.items() if each != name}

    cases: list[tuple[Any, Any, str]] = [
        (without("2.1.linear.bias"), None, "2.1.linear.bias is missing"),
        (
            lambda found: found | {"4.0.linear.weight": torch.ones(1)},
            None,
            "4.0.linear.weight is no part of 4",
        ),
        (
            lambda found: found | {"0.0.linear.weight": torch.ones(48, 48)},
            None,
            r"0.0.linear.weight is \[48, 48\], needed is \[32, 32\] for a target of hidden size 32",
        ),
        (lambda found: found | {"0.2.weight": torch.ones(257, 32)}, None, "1.2.weight is missing"),
        (lambda _found: {}, None, r"it has no \*.safetensors"),
        (None, {"medusa_num_heads": 0}, "medusa_num_heads: 0 is no number between 1 and 32"),
        (None, {"medusa_num_layers": "1"}, "medusa_num_layers: '1' is no number"),
        (None, {"medusa_choices": [[0], [0, 0, 0]]}, r"\[0, 0, 0\] has no parent \[0, 0\]"),
        (None, {"medusa_choices": [[0] * 5]}, "is not 1 to 4 deep"),
        (None, {"medusa_choices": [0]}, "no list of lists of ranks"),
    ]
    for number, (tensors, config, message) in enumerate(cases):
        broken = changed_heads(tmp_path / str(number), heads, tensors, config)
        with pytest.raises(
            InvalidModel, match=f"draft: the Medusa heads in {broken} cannot serve: .*{message}"
        ):
            engine_of(models, "llama", broken)
    nan = changed_heads(
        tmp_path / "nan", heads, lambda found: found | {"1.0.linear.bias": torch.full((32,), torch.nan)}
    )
    with pytest.raises(InvalidModel, match=r"1.0.linear.bias is not finite"):
        engine_of(models, "llama", nan)
    with pytest.raises(InvalidModel, match="--drafter eagle3 takes an EAGLE-3 head"):
        Engine(EngineConfig(str(models / "llama"), heads, "eagle3"))
    with pytest.raises(InvalidModel, match="which drafts trees; --drafter hybrid takes a draft model"):
        Engine(EngineConfig(str(models / "llama"), heads, "hybrid"))
    with pytest.raises(InvalidModel, match="drafts trees, which are verified by a rule of their own"):
        engine_of(models, "llama", heads, verification="block")
    with pytest.raises(InvalidConfig, match="'medusa' needs a draft directory"):
        EngineConfig(str(models / "llama"), None, "medusa")
    assert not is_medusa(models / "llama")
    assert not is_medusa(tmp_path / "nothing")


def test_the_memory_of_heads_is_told(models: Path, heads_of: Callable[[str], str]) -> None:
    config = EngineConfig(str(models / "llama"), heads_of("llama"), "medusa", max_batch=3, max_length=40)
    placement = placement_of(config)
    needed = ModelMemory.read("draft", heads_of("llama"), torch.float32)
    assert needed.weights == 4 * 2 * (32 * 32 + 32) * 4
    assert needed.cache(placement) == 3 * 40 * 32 * 4
    assert needed.step(placement, 4) == 0  # the logits are the target's
