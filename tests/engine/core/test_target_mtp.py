"""`--drafter mtp` without a draft: the layer in the target's own checkpoint serves, or is refused by name."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import InvalidModel
from driftguard_engine.drafters.heads import ChainDrafter
from driftguard_engine.engine import Engine
from driftguard_engine.models import device_memory
from driftguard_engine.models.device_memory import ModelMemory
from driftguard_engine.models.generic import GenericModel
from driftguard_engine.models.target_mtp import TargetMtpModel, read_target_mtp
from safetensors.torch import load_file, save_file

from tests.engine.core.eagle3_heads import load_target
from tests.engine.core.engine_laws import exact_distribution, p_value
from tests.engine.core.every_drafter import LETTERS, PROMPT
from tests.engine.core.target_mtps import save_with_mtp
from tests.engine.core.test_batch_independence import together
from tests.engine.core.tiny import letter_tokenizer, request, save, serve, tokens

LAYER = "model.layers.2."


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_with_mtp(tmp_path_factory.mktemp("deepseek") / "target", "deepseek_v3")


def engine_of(target: Path, drafter: str = "mtp", **changes: Any) -> Engine:
    return Engine(EngineConfig(str(target), drafter=drafter, **{"max_batch": 4, "max_length": 64} | changes))


def test_output_does_not_depend_on_the_batch_and_is_plain_decoding_where_it_is_greedy(target: Path) -> None:
    rng = random.Random(7)
    asked = [
        request(
            f"r{index}",
            [rng.randrange(257) for _ in range(length)],
            9,
            temperature=0.7 * (index % 2),
            seed=index,
            num_speculative_tokens=(None, 1, 7)[index % 3],
        )
        for index, length in enumerate((1, 2, 8, 9, 17, 3, 5))
    ]
    engine = engine_of(target, max_batch=3, prefill_chunk_tokens=8)
    done = {name: each for one in asked for name, each in serve(engine, one).items()}
    alone = {name: each.output_token_ids for name, each in done.items()}
    assert together(engine, asked, seed=1) == alone
    assert sum(each.counts.drafted for each in done.values()) > 100
    greedy = [each for each in asked if each.params.temperature == 0]
    plain = tokens(engine_of(target, "none"), *greedy)
    assert len(plain) == 4
    assert plain == {name: alone[name] for name in plain}


@pytest.mark.slow
def test_the_output_has_the_distribution_of_the_target(tmp_path: Path) -> None:
    directory = save_with_mtp(tmp_path / "letters", "deepseek_v3", letter_tokenizer(LETTERS))
    engine = engine_of(directory, max_batch=256, num_speculative_tokens=2)
    asked = [request(str(seed), PROMPT, 3, seed=seed, temperature=1.0) for seed in range(800)]
    done = serve(engine, *asked)
    assert sum(each.counts.accepted for each in done.values()) > 200
    found = p_value(
        Counter(each.output_token_ids[:3] for each in done.values()),
        exact_distribution(load_target(directory)),
    )
    print(f"seeds 0 to 799: p-value {found:.3f}")
    assert found > 1e-3


def change(directory: Path, original: Path, **tensors: torch.Tensor | None) -> Path:
    """A copy of it with tensors of the layer in place of others; None: without. "-" stands for "."."""
    shutil.copytree(original, directory)
    whole = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        whole.pop(LAYER + name.replace("-", "."), None)
        if tensor is not None:
            whole[LAYER + name.replace("-", ".")] = tensor
    save_file(whole, directory / "model.safetensors", {"format": "pt"})
    return directory


def configure(directory: Path, **changes: Any) -> None:
    told = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(told | changes))


def refused(directory: Path) -> str:
    with pytest.raises(InvalidModel) as raised:
        engine_of(directory)
    assert raised.value.field == "target"
    assert str(directory) in raised.value.detail
    return raised.value.detail


@pytest.mark.parametrize(
    ("tensors", "config", "reason"),
    [
        ({"enorm-weight": None}, {}, f"{LAYER}enorm.weight is missing"),
        ({"mlp-experts-3-up_proj-weight": None}, {}, f"{LAYER}mlp.experts.3.up_proj.weight is missing"),
        (
            {"mlp-experts-0-down_proj-weight": torch.ones(32, 8)},
            {},
            f"{LAYER}mlp.experts.0.down_proj.weight is [32, 8], needed is [32, 16] for this target",
        ),
        (
            {"eh_proj-weight": torch.ones(32, 32)},
            {},
            f"{LAYER}eh_proj.weight is [32, 32], needed is [32, 64]",
        ),
        (
            {"eh_proj-weight_scale_inv": torch.ones(1, 1)},
            {},
            f"{LAYER}eh_proj.weight_scale_inv is no part of its MTP layer",
        ),
        (
            {"mlp-experts-4-up_proj-weight": torch.ones(16, 32)},
            {},
            f"{LAYER}mlp.experts.4.up_proj.weight is no part of its MTP layer",
        ),
        (
            {"shared_head-head-weight": torch.ones(257, 32)},
            {},
            f"{LAYER}shared_head.head.weight is not equal to lm_head.weight",
        ),
        ({"hnorm-weight": torch.full((32,), torch.nan)}, {}, "state_norm.weight is not finite"),
        ({}, {"num_nextn_predict_layers": 0}, "config.json says num_nextn_predict_layers 0"),
        ({}, {"num_nextn_predict_layers": 2}, "num_nextn_predict_layers: 2, only 1 is computed"),
    ],
    ids=lambda given: next(iter(given), "") if isinstance(given, dict) else "",
)
def test_a_layer_that_does_not_fit_is_refused_by_name(
    target: Path,
    tmp_path: Path,
    tensors: dict[str, torch.Tensor | None],
    config: dict[str, int],
    reason: str,
) -> None:
    directory = change(tmp_path / "target", target, **tensors)
    configure(directory, **config)
    assert reason in refused(directory)


def test_a_target_without_the_layer_is_refused(target: Path, models: Path, tmp_path: Path) -> None:
    loaded = load_target(target)  # transformers leaves the layer out, and saves none
    loaded.save_pretrained(tmp_path / "saved")
    for path in target.glob("tokenizer*"):
        shutil.copy(path, tmp_path / "saved")
    assert f"its checkpoint has no tensor {LAYER}*" in refused(tmp_path / "saved")
    assert "of the model_type 'llama' none is read, only of deepseek_v3, " in refused(models / "llama")


def test_the_version_is_that_of_the_layer(target: Path, tmp_path: Path) -> None:
    first = engine_of(target).draft
    assert (first.name, first.method, first.directory) == ("mtp", "mtp", None)
    assert len(first.version) == 12
    shutil.copytree(target, tmp_path / "same")
    assert engine_of(tmp_path / "same").draft == first
    other = change(tmp_path / "other", target, **{"hnorm-weight": torch.ones(32)})
    assert engine_of(other).draft.version != first.version


def test_another_draft_takes_its_place_and_a_rollback_and_a_restart_return_to_it(
    target: Path, tmp_path: Path
) -> None:
    draft = save(tmp_path / "draft", seed=5)
    engine = engine_of(target, state_dir=tmp_path / "state")
    own, expected = engine.draft, tokens(engine, request())
    other = engine.load_draft(draft)
    engine.swap_draft(other.version)
    served = serve(engine, request())["r"]
    assert (served.draft, served.output_token_ids) == (other, expected["r"])
    assert engine_of(target, state_dir=tmp_path / "state").draft.directory == draft
    engine.swap_draft(own.version)
    again = engine_of(target, state_dir=tmp_path / "state")
    for each in (engine, again):
        served = serve(each, request())["r"]
        assert (served.draft, served.output_token_ids) == (own, expected["r"])
        assert served.counts.drafted > 0


def test_its_memory_counts_where_it_is_loaded(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(target)
    drafter = engine._drafts.drafter
    assert isinstance(drafter, ChainDrafter)
    assert isinstance(drafter._model, TargetMtpModel)
    cache, placed = drafter._model._cache, engine._placement
    told = ModelMemory.read("mtp", str(target), torch.float32)
    assert told.cache(placed) == sum(each.nbytes for each in [*cache.keys, *cache.values])
    layer, _ = read_target_mtp(target, torch.empty(0))
    assert told.weights == sum(each.nbytes for each in layer.state_dict().values())
    main, model = ModelMemory.read("target", str(target), torch.float32), engine._target.model
    assert isinstance(model, GenericModel)
    assert main.cache(placed) == sum(each.nbytes for each in [*model._store.keys, *model._store.values])
    assert main.weights == sum(each.nbytes for each in load_target(target).state_dict().values())
    needed = sum(
        each.weights + each.cache(placed) + each.step(placed, engine.config.max_speculative_tokens)
        for each in (main, told)
    )
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: needed + device_memory.RESERVE_BYTES - 1)
    with pytest.raises(InvalidModel, match=r"^target: max_batch 4 .*; mtp: weights "):
        engine_of(target)
    monkeypatch.setattr(device_memory, "free_bytes", lambda device: needed + device_memory.RESERVE_BYTES)
    engine_of(target)
