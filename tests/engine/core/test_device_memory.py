"""Models that a GPU's memory cannot hold are refused before they are loaded, with settings that fit."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import InvalidModel
from driftguard_engine.drafters.heads import HeadDrafter
from driftguard_engine.engine import Engine
from driftguard_engine.kernels.layer_launches import AttentionScratch
from driftguard_engine.models import device_memory, loading
from driftguard_engine.models.chain_heads import Eagle3Model
from driftguard_engine.models.device_memory import RESERVE_BYTES, ModelMemory, check_fits, free_bytes
from driftguard_engine.models.eagle3_head import read_head
from driftguard_engine.models.generic import GenericModel
from driftguard_engine.models.llama import LlamaModel
from driftguard_engine.models.loading import Placement, load
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.engine.core.eagle3_heads import load_target, save_random_head, sizes_of
from tests.engine.core.heads import save_random
from tests.engine.core.tiny import request, save, tokens
from tests.engine.kernels.emulated import SOURCES, Emulated
from tests.engine.simt.emulator import Module

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
}


def give(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    """A GPU with so much free memory, where a real one is asked."""
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free), 1 << 40))


def play_gpu(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    """On the CPU."""
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: int(free))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("odd_llama", {}),
        ("gpt2", {}),
        ("gpt_neox", {}),
    ],
    ids=str,
)
def test_what_is_computed_is_what_torch_allocates(
    tmp_path: Path, kind: str, changes: dict[str, Any], dtype: torch.dtype
) -> None:
    directory = save(tmp_path / kind, kind, seed=1, **changes)
    placement = Placement(dtype, CPU, slots=3, max_length=50, spare=7)
    told = ModelMemory.read("target", directory, dtype)
    module = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
    assert told.weights == sum(each.nbytes for each in module.parameters())
    model = load(directory, placement, field="target").model
    assert isinstance(model, LlamaModel | GenericModel)
    cache = model._spans.cache if isinstance(model, LlamaModel) else model._store
    assert told.cache(placement) == sum(each.nbytes for each in [*cache.keys, *cache.values])


@pytest.mark.parametrize("unembeds", [True, False])
def test_what_is_computed_of_a_head_is_what_torch_allocates(tmp_path: Path, unembeds: bool) -> None:
    directory = Path(save(tmp_path / "llama", "llama", seed=1))
    target = load_target(directory)
    token_ids = range(0, 257, 2 if unembeds else 1)
    save_random_head(tmp_path / "head", target, token_ids, (0, 1), unembeds=unembeds)
    placement = Placement(torch.float32, CPU, slots=3, max_length=50, spare=7)
    told = ModelMemory.read("draft", str(tmp_path / "head"), torch.float32)
    head, ids = read_head(tmp_path / "head", sizes_of(target), field="draft")
    maps = ids.nbytes + 257 if unembeds else 0  # d2t, t2d
    assert told.weights == sum(each.nbytes for each in head.parameters()) + maps
    cache = Eagle3Model(head, ids, target.model.embed_tokens.weight, target.lm_head, 257, 3, 57)._cache
    assert told.cache(placement) == sum(each.nbytes for each in [*cache.keys, *cache.values])


@pytest.mark.parametrize(
    ("kind", "settings"), [("peagle", {"layers": 2}), ("mtp", {}), ("dflash", {})], ids=str
)
def test_what_is_computed_of_other_heads_is_what_torch_allocates(
    tmp_path: Path, kind: str, settings: dict[str, Any]
) -> None:
    directory = Path(save(tmp_path / "llama", "llama", seed=1))
    save_random(tmp_path / "head", kind, load_target(directory), **settings)
    engine = Engine(EngineConfig(str(directory), str(tmp_path / "head"), kind, max_batch=3, max_length=50))
    drafter = engine._drafts._serving.drafter
    assert isinstance(drafter, HeadDrafter)
    told, cache = ModelMemory.read("draft", str(tmp_path / "head"), torch.float32), drafter._model._cache
    placed = Placement(torch.float32, CPU, slots=3, max_length=50)
    assert told.cache(placed) == sum(each.nbytes for each in [*cache.keys, *cache.values])


@pytest.mark.parametrize("kind", ["eagle3", "mtp"])
def test_of_a_head_counts_what_is_loaded_whatever_its_files_are_called(tmp_path: Path, kind: str) -> None:
    target, head = load_target(Path(save(tmp_path / "llama", "llama", seed=1))), tmp_path / "head"
    if kind == "eagle3":
        save_random_head(head, target, range(257), (0, 1))
    else:
        save_random(head, kind, target)
    told = ModelMemory.read("draft", str(head), torch.float32)
    (head / "model.safetensors").rename(head / "head.safetensors")
    of_target = {"eagle3": "verifier_lm_head.weight", "mtp": "lm_head.weight"}[kind]
    save_file({of_target: torch.zeros(257, 32)}, head / "more.safetensors")
    assert ModelMemory.read("draft", str(head), torch.float32).weights == told.weights


def test_the_memory_of_a_step_is_that_of_its_logits_and_its_attention(
    tmp_path: Path, compiled: Callable[..., Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = save(tmp_path / "llama", num_attention_heads=4, hidden_size=64)
    launcher = Emulated(compiled(*SOURCES))
    placement = Placement(torch.float32, CPU, slots=3, max_length=50, spare=7, launcher=launcher)
    model = load(directory, placement, field="target").model
    assert isinstance(model, LlamaModel)
    assert model.kernels_obstacle is None
    allocated: list[int] = []
    make = AttentionScratch.empty

    def counted(*arguments: Any) -> Any:
        scratch = make(*arguments)
        allocated.append(sum(each.nbytes for each in (scratch.values, scratch.maxima, scratch.sums)))
        return scratch

    monkeypatch.setattr(AttentionScratch, "empty", counted)
    ids = torch.ones(3, 5, dtype=torch.int64)
    logits = model.decode(ids, torch.zeros(3, dtype=torch.int64), torch.arange(3))
    assert len(allocated) == 2  # layers, of which each frees it before the next
    told = ModelMemory.read("target", directory, torch.float32)
    assert told.step(placement, drafts=4) == logits.nbytes + max(allocated)


@pytest.fixture
def llama_8b(tmp_path: Path) -> str:
    """Its config, and the header of its weights in two shards beside a copy of another format."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_8B))
    for name in ("model-1", "model-2", "consolidated"):
        save_file(
            {f"{name}.weight": torch.zeros(1 << 20, dtype=torch.bfloat16)}, tmp_path / f"{name}.safetensors"
        )
    index = {"weight_map": {f"{name}.weight": f"{name}.safetensors" for name in ("model-1", "model-2")}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    return str(tmp_path)


def refused(config: EngineConfig, placement: Placement, directory: str) -> str:
    with pytest.raises(InvalidModel) as raised:
        check_fits(config, placement, free_bytes(placement.device), [("target", directory)])
    assert raised.value.field == "target"
    return raised.value.detail


def test_the_cache_of_an_8b_for_64_long_requests_is_refused_with_the_largest_settings_that_fit(
    llama_8b: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def checked(max_batch: int, max_length: int) -> tuple[EngineConfig, Placement, str]:
        config = EngineConfig(
            llama_8b, drafter="none", dtype="bfloat16", max_batch=max_batch, max_length=max_length
        )
        # One slot and 31 positions more, as the device's loop has them.
        return config, Placement(torch.bfloat16, CUDA, max_batch + 1, max_length, spare=31), llama_8b

    give(monkeypatch, 40 * 2**30)
    said = refused(*checked(64, 8192))
    cache = 65 * (8192 + 31) * 32 * 2 * 8 * 128 * 2 / 2**30
    assert f"cache {cache:.2f} GiB" in said
    assert "target: max_batch 64 and max_length 8192 need" in said
    assert "of which 40.00 GiB are free" in said
    assert "weights 0.00 GiB" in said
    found = re.search(r"max_batch (\d+) or max_length (\d+) would fit", said)
    assert found is not None
    batch, length = int(found[1]), int(found[2])
    for fitting, beyond in (((batch, 8192), (batch + 1, 8192)), ((64, length), (64, length + 1))):
        config, placement, directory = checked(*fitting)
        check_fits(config, placement, free_bytes(placement.device), [("target", directory)])
        refused(*checked(*beyond))
    give(monkeypatch, 1)
    assert "no other max_batch or max_length would fit" in refused(*checked(64, 8192))


def test_weights_that_are_not_loaded_do_not_count(llama_8b: str) -> None:
    assert ModelMemory.read("target", llama_8b, torch.bfloat16).weights == 2 * 2 * 2**20
    assert ModelMemory.read("target", llama_8b, torch.float32).weights == 2 * 4 * 2**20


def test_quantised_weights_count_as_they_are_stored(llama_8b: str) -> None:
    weights = {"packed": torch.zeros(5, dtype=torch.int32), "fp8": torch.zeros(9).to(torch.float8_e4m3fn)}
    save_file(weights | {"mask": torch.ones(3, dtype=torch.bool)}, Path(llama_8b, "model.safetensors"))
    assert ModelMemory.read("target", llama_8b, torch.bfloat16).weights == 5 * 4 + 9 + 3


def test_all_memory_that_is_free_is_asked_of_a_gpu_and_none_of_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    give(monkeypatch, 123)
    assert (free_bytes(CUDA), free_bytes(CPU)) == (123, None)


def test_an_engine_whose_models_do_not_fit_loads_no_weights(
    new_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load_weights(*_: Any, **__: Any) -> None:
        raise AssertionError("weights are loaded")

    play_gpu(monkeypatch, RESERVE_BYTES)
    monkeypatch.setattr(loading, "_load_module", load_weights)
    with pytest.raises(InvalidModel, match=r"^target: max_batch 4 .*; draft: weights "):
        new_engine()


def needs(engine: Engine, field: str, directory: str) -> int:
    told = ModelMemory.read(field, directory, torch.float32)
    step = told.step(engine._placement, engine.config.max_speculative_tokens)
    return told.weights + told.cache(engine._placement) + step


def test_a_draft_for_which_no_memory_is_left_is_refused_and_one_that_fits_is_not(
    new_engine: Callable[..., Engine], models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, other = new_engine(), save(tmp_path / "other", seed=5)
    expected = tokens(engine, request())
    needed = needs(engine, "draft", other) + RESERVE_BYTES
    play_gpu(monkeypatch, needed - 1)
    with pytest.raises(
        InvalidModel, match=r"^draft: max_batch 4 .*max_batch 3 or max_length 159 would fit"
    ) as raised:
        engine.load_draft(other)
    assert raised.value.field == "draft"
    assert len(engine.drafts) == 1
    assert tokens(engine, request()) == expected
    play_gpu(monkeypatch, needed)
    loaded = engine.load_draft(other)
    assert loaded in engine.drafts
    play_gpu(monkeypatch, 0)
    assert engine.load_draft(other) == loaded, "it is in memory already"
    with pytest.raises(InvalidModel, match=r"^draft: max_batch 4 "):
        engine.load_draft(str(engine.draft.directory), "again")  # it would be there twice


def test_a_promoted_draft_that_does_not_fit_after_a_restart_gives_way_to_the_configured_one(
    new_engine: Callable[..., Engine],
    models: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    wide = save(tmp_path / "wide", seed=5, intermediate_size=4800)
    engine = new_engine(state_dir=tmp_path / "state")
    engine.swap_draft(engine.load_draft(wide).version)
    configured = needs(engine, "target", str(models / "llama")) + needs(
        engine, "draft", str(models / "llama_draft")
    )
    assert configured < needs(engine, "draft", wide)
    play_gpu(monkeypatch, configured + RESERVE_BYTES)
    with caplog.at_level(logging.ERROR):
        again = new_engine(state_dir=tmp_path / "state")
    assert again.draft.directory == str(models / "llama_draft")
    assert "cannot be loaded (draft: max_batch 4 and max_length 2048 need" in caplog.text
