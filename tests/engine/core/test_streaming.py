"""Speculative Streaming in the engine: what streams guess, the main stream untouched, greedy output, the
target's law, reuse, swaps and refusals."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from driftguard_engine.config import EngineConfig, InvalidConfig
from driftguard_engine.core import InvalidModel
from driftguard_engine.decode.placement import placement_of
from driftguard_engine.drafters.streaming import StreamingDrafter
from driftguard_engine.engine import Engine
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.kv_cache import Span
from driftguard_engine.models.base import Features
from driftguard_engine.models.device_memory import ModelMemory
from driftguard_engine.models.llama import LlamaModel
from driftguard_engine.models.streaming import StreamingModel
from driftguard_engine.models.streaming_adapter import is_streaming, read_adapter
from driftguard_engine.speculation import TreeVerification
from driftguard_training.streaming import WEIGHTS, stream_logits
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.engine.core.eagle3_heads import load_target
from tests.engine.core.medusa_heads import TREE
from tests.engine.core.streaming_adapters import save_random_adapter
from tests.engine.core.tiny import plain_greedy, request, save, serve

PROMPTS = {"a": (7,), "b": (1, 2, 3, 4) * 5, "c": tuple(range(30, 60))}
Mistake = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def adapter_of(models: Path) -> Callable[[str], str]:
    """Directories of random adapters for all layers of the models of each kind."""

    def make(kind: str) -> str:
        directory = models / f"{kind}_streaming"
        return (
            str(directory) if directory.exists() else save_random_adapter(directory, models / kind, layers=2)
        )

    return make


def engine_of(models: Path, kind: str, adapter: str, **settings: Any) -> Engine:
    settings = {"max_batch": 4, "prefill_chunk_tokens": 8} | settings
    return Engine(EngineConfig(str(models / kind), adapter, "streaming", **settings))


def adapter_for(target: LlamaModel, directory: str) -> Any:
    sizes = target.layers, target.intermediate, target.heads, target.embedding
    return read_adapter(Path(directory), *sizes, field="draft")


def streams_of(target: LlamaModel, directory: str) -> StreamingModel:
    return StreamingModel(adapter_for(target, directory), target, 1, 80)


def guesses_and_output_are_right(
    models: Path, adapter: str, monkeypatch: pytest.MonkeyPatch, kind: str = "llama"
) -> bool:
    """Guesses of every step against the streams that are trained, computed anew over the whole text, and the
    output against plain greedy decoding."""
    module = load_target(models / kind)
    drafted: list[tuple[tuple[int, ...], list[int]]] = []
    draft_tree = StreamingDrafter.draft_tree

    def recorded(self: StreamingDrafter, rows: RowState, tree: TreeVerification) -> None:
        draft_tree(self, rows, tree)
        for row, (slot, length) in enumerate(zip(rows.slots.tolist(), rows.lengths.tolist(), strict=True)):
            text = tuple(rows.state.token_ids[slot, :length].tolist())
            drafted.append((text, tree.tokens[row].tolist()))

    with monkeypatch.context() as patched:
        patched.setattr(StreamingDrafter, "draft_tree", recorded)
        engine = engine_of(models, kind, adapter)
        asked = [
            request(f"{name}{k}", PROMPTS[name], 30, num_speculative_tokens=k)
            for name in PROMPTS
            for k in (2, 6)
        ]
        done = serve(engine, *asked)
    assert {each.verification for each in done.values()} == {"tree"}
    assert sum(each.counts.accepted for each in done.values()) > 5
    if any(
        each.output_token_ids != plain_greedy(kind, each.request.prompt_token_ids, 30)
        for each in done.values()
    ):
        return False
    trained = adapter_for(LlamaModel(load_target(models / kind), 1, 80), adapter)
    for text, found in drafted:
        if len(text) == 1:
            assert set(found) <= {-1}
            continue
        with torch.inference_mode():
            states = module(torch.tensor([text[:-1]]), output_hidden_states=True).hidden_states
            logits = stream_logits(trained, module, states)[0, :, -1]
        best = logits.topk(3).indices.tolist()
        expected = [best[len(path) - 1][path[-1]] for path in TREE]
        if any(token >= 0 and token != right for token, right in zip(found, expected, strict=False)):
            return False
    return True


@pytest.mark.parametrize("kind", ["llama", "odd_llama"])
def test_each_step_guesses_what_the_streams_say(
    models: Path, adapter_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    assert guesses_and_output_are_right(models, adapter_of(kind), monkeypatch, kind)


@pytest.mark.parametrize("kind", ["qwen2", "qwen3"])
def test_streams_of_each_family_are_those_that_are_trained(tmp_path: Path, kind: str) -> None:
    save(tmp_path / kind, kind, seed=3)
    adapter = save_random_adapter(tmp_path / "adapter", tmp_path / kind, layers=1)
    target, module = LlamaModel(load_target(tmp_path / kind), 1, 80), load_target(tmp_path / kind)
    streams, text, features = streams_of(target, adapter), [*range(30, 45)], Features((1,))
    target.prefill(text, [Span(0, 0, 15)], features)
    streams.keep(features.of((1,)), torch.zeros(15, dtype=torch.int64), torch.arange(15))
    found = list(streams.predictions(torch.tensor([0]), torch.tensor([16]), torch.tensor([6])))
    with torch.inference_mode():
        states = module(torch.tensor([text]), output_hidden_states=True).hidden_states
        expected = stream_logits(adapter_for(target, adapter), module, states)[0, :, -1]
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-4, rtol=1e-4)


def spans_moved(by: int) -> Mistake:
    """Of streams that keep their positions."""

    class Moved(Span):
        @property
        def positions(self) -> Sequence[int]:
            return range(self.start - by, self.end - by)

    def plant(monkeypatch: pytest.MonkeyPatch) -> None:
        read = LlamaModel.read_beside

        def moved(self: LlamaModel, hidden: Tensor, spans: Sequence[Span], top: Any) -> Tensor:
            there = [Moved(each.slot, each.start + by, each.count) for each in spans]
            return read(self, hidden, there, top)

        monkeypatch.setattr(LlamaModel, "read_beside", moved)

    return plant


def adapter_in_the_main_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    read = LlamaModel.read_beside

    def adapted(self: LlamaModel, hidden: Tensor, spans: Sequence[Span], top: Any) -> Tensor:
        self._layers[self.layers - len(top) :] = top
        return read(self, hidden, spans, top)

    monkeypatch.setattr(LlamaModel, "read_beside", adapted)


MISTAKES: dict[str, Mistake] = {
    "keys of the streams kept for the next step": spans_moved(1),
    "keys of the streams over those of the main stream": spans_moved(-1),
    "adapter in the main stream": adapter_in_the_main_stream,
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_caught(
    models: Path, adapter_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    MISTAKES[mistake](monkeypatch)
    assert not guesses_and_output_are_right(models, adapter_of("llama"), monkeypatch)


def main_stream_is_untouched(models: Path, adapter: str) -> bool:
    """Logits of every token, bit for bit, with streams run before it and without."""

    def logits(with_streams: bool) -> Iterator[Tensor]:
        target = LlamaModel(load_target(models / "llama"), 1, 80)
        streams = streams_of(target, adapter)
        states = torch.randn(60, target.hidden, generator=torch.Generator().manual_seed(1))
        streams.keep(states, torch.zeros(60, dtype=torch.int64), torch.arange(60))
        text, slot = [*PROMPTS["b"], *PROMPTS["c"]], torch.tensor([0])
        for place, token in enumerate(text):
            if with_streams:
                list(streams.predictions(slot, torch.tensor([place + 1]), torch.tensor([4])))
            yield target.forward([token], [Span(0, place, 1)])

    return all(torch.equal(*each) for each in zip(logits(True), logits(False), strict=True))


def test_the_logits_of_the_main_stream_are_bit_for_bit_those_without_streams(
    models: Path, adapter_of: Callable[[str], str]
) -> None:
    assert main_stream_is_untouched(models, adapter_of("llama"))


@pytest.mark.parametrize(
    "mistake", ["keys of the streams over those of the main stream", "adapter in the main stream"]
)
def test_a_touched_main_stream_is_caught(
    models: Path, adapter_of: Callable[[str], str], monkeypatch: pytest.MonkeyPatch, mistake: str
) -> None:
    MISTAKES[mistake](monkeypatch)
    assert not main_stream_is_untouched(models, adapter_of("llama"))


def changed(directory: Path, adapter: str, tensors: Any = None, config: Any = None) -> str:
    directory.mkdir()
    told = json.loads((Path(adapter) / "config.json").read_text()) | (config or {})
    (directory / "config.json").write_text(json.dumps(told))
    found = load_file(Path(adapter) / WEIGHTS)
    save_file(found if tensors is None else tensors(found), directory / "model.safetensors")
    return str(directory)


def test_what_does_not_fit_is_refused_by_name(
    models: Path, adapter_of: Callable[[str], str], tmp_path: Path
) -> None:
    adapter = adapter_of("llama")
    cases: list[tuple[Any, Any, str]] = [
        (None, {"streaming_layers": 3}, "streaming_layers: 3 are more than the target's 2"),
        (None, {"streaming_layers": 1}, "layers.1.down_proj.A is no part of an adapter of 1 layers"),
        (None, {"streaming_rank": 0}, "streaming_rank: 0 is no number between 1 and 32"),
        (None, {"streaming_streams": 5}, r"embeddings is \[4, 32\], needed is \[5, 32\] for 5 streams"),
        (None, {"streaming_choices": [[0] * 5]}, "streaming_choices: .* is not 1 to 4 deep"),
        (lambda _found: {}, None, r"it has no \*.safetensors"),
        (
            lambda found: {name: each for name, each in found.items() if name != "layers.0.q_proj.B"},
            None,
            "layers.0.q_proj.B is missing",
        ),
    ]
    for number, (tensors, config, message) in enumerate(cases):
        broken = changed(tmp_path / str(number), adapter, tensors, config)
        told = f"draft: the streaming adapter in {broken} cannot serve: {message}"
        with pytest.raises(InvalidModel, match=told):
            engine_of(models, "llama", broken)
    with pytest.raises(InvalidModel, match=r"\[3, 32\], needed is \[3, 30\] for .* hidden size 30"):
        engine_of(
            models,
            "odd_llama",
            changed(tmp_path / "width", adapter, lambda found: found | {"embeddings": torch.zeros(4, 30)}),
        )
    nan = changed(
        tmp_path / "nan", adapter, lambda found: found | {"embeddings": torch.full((4, 32), torch.nan)}
    )
    with pytest.raises(InvalidModel, match="embeddings is not finite"):
        engine_of(models, "llama", nan)
    for kind, path in (("llama", "generic"), ("gpt2", "auto")):
        with pytest.raises(InvalidModel, match="is a streaming adapter, and the target runs on the generic"):
            engine_of(models, kind, adapter, model_path=path)
    with pytest.raises(InvalidModel, match="is a streaming adapter, for --drafter streaming"):
        Engine(EngineConfig(str(models / "llama"), adapter, "medusa"))
    with pytest.raises(InvalidModel, match="is a streaming adapter, which drafts trees; --drafter hybrid"):
        Engine(EngineConfig(str(models / "llama"), adapter, "hybrid"))
    with pytest.raises(InvalidModel, match="drafts trees, which are verified by a rule of their own"):
        engine_of(models, "llama", adapter, verification="block")
    with pytest.raises(InvalidConfig, match="'streaming' needs a draft directory"):
        EngineConfig(str(models / "llama"), None, "streaming")
    assert not is_streaming(tmp_path / "nothing")


def test_the_memory_of_an_adapter_is_told(models: Path, adapter_of: Callable[[str], str]) -> None:
    directory = adapter_of("llama")
    config = EngineConfig(str(models / "llama"), directory, "streaming", max_batch=3, max_length=40)
    needed = ModelMemory.read("draft", directory, torch.float32)
    numbers = sum(each.numel() for each in load_file(Path(directory) / WEIGHTS).values())
    assert needed.weights == numbers * 4
    assert needed.cache(placement_of(config)) == 3 * 40 * 32 * 4
