"""What vLLM's workers load of a directory, and what they refuse before they touch the draft that serves.

The bases of vLLM 0.32 stand in here; tests/live loads drafts into vLLM itself.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from driftguard.retraining.training.checksums import FILE_NAME, DraftChanged, digest_of_list
from tests.training.small_models import save_directory, small_model


class WeightTransferEngine:
    """What of vllm/distributed/weight_transfer/base.py the backend relies on."""

    init_info_cls: Any
    update_info_cls: Any

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        del config, vllm_config, device
        self.model = self._default_model = model
        self.model_config = None

    def parse_update_info(self, update: dict[str, Any]) -> Any:
        return self.update_info_cls(**update)


class Model(torch.nn.Module):
    """A draft in a worker."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=True)
        self.served = load_file(directory / "model.safetensors")
        self.lm_head = SimpleNamespace(quant_method=SimpleNamespace(process_weights_after_loading=self._pack))
        self.packed = self.served["model.embed_tokens.weight"]

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        self.served = dict(weights)

    def _pack(self, _: Any) -> None:
        self.packed = self.served["model.embed_tokens.weight"]


@pytest.fixture
def draft_weights(monkeypatch: pytest.MonkeyPatch) -> Any:
    base, reload = (
        ModuleType("vllm.distributed.weight_transfer.base"),
        ModuleType("vllm.model_executor.model_loader.reload"),
    )
    base.WeightTransferEngine = WeightTransferEngine  # type: ignore[attr-defined]
    base.WeightTransferInitInfo = base.WeightTransferUpdateInfo = object  # type: ignore[attr-defined]
    reload.initialize_layerwise_reload = lambda _model: None  # type: ignore[attr-defined]
    reload.finalize_layerwise_reload = lambda _model, _config: None  # type: ignore[attr-defined]
    for module in (base, reload):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.delitem(sys.modules, "driftguard_vllm.draft_weights", raising=False)
    yield import_module("driftguard_vllm.draft_weights")
    sys.modules.pop("driftguard_vllm.draft_weights", None)


@pytest.fixture
def first(tmp_path: Path) -> Path:
    return save_directory(tmp_path / "first", small_model(1))


@pytest.fixture
def second(tmp_path: Path) -> Path:
    directory = save_directory(tmp_path / "second", small_model(2))
    write_list(directory)
    return directory


def write_list(directory: Path) -> None:
    files = [path for path in sorted(directory.iterdir()) if path.name != FILE_NAME]
    lines = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files]
    (directory / FILE_NAME).write_text("".join(lines))


def made(draft_weights: Any, first: Path, method: str = "draft_model") -> Any:
    """In a vLLM that was started with this draft."""
    speculative = SimpleNamespace(method=method, draft_model_config=SimpleNamespace(model=str(first)))
    config = SimpleNamespace(speculative_config=speculative)
    return draft_weights.DraftLoader(None, config, torch.device("cpu"), torch.nn.Module())


def loader_of(draft_weights: Any, first: Path) -> Any:
    """In a session that /start_draft_weight_update began."""
    loader = made(draft_weights, first)
    loader.model = Model(first)
    loader.start_weight_update()
    return loader


def told(directory: Path) -> dict[str, Any]:
    return {"directory": str(directory), "checksums_sha256": digest_of_list(directory)}


def test_it_loads_what_was_held(draft_weights: Any, first: Path, second: Path) -> None:
    loader, before, after = loader_of(draft_weights, first), *(load_of(path) for path in (first, second))
    loader.init_transfer_engine(draft_weights.InitInfo(driftguard=True))
    loader.update_weights(told(second))
    assert same(loader.model.served, before)
    loader.finish_weight_update()
    assert same(loader.model.served, after)
    assert torch.equal(loader.model.packed, after["model.embed_tokens.weight"])
    loader.start_weight_update()
    loader.finish_weight_update()  # a session without a directory ends and loads nothing
    loader.start_weight_update()
    loader.update_weights({"directory": str(first)})  # from elsewhere, without a list
    loader.update_weights({})
    loader.finish_weight_update()
    assert same(loader.model.served, after)


def other_shape(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:4].clone()
    save_file(tensors, directory / "model.safetensors")
    write_list(directory)


def one_less(directory: Path) -> None:
    tensors = load_file(directory / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, directory / "model.safetensors")
    write_list(directory)


def other_configuration(directory: Path) -> None:
    found = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**found, "rms_norm_eps": 0.5, "dtype": "other"}))
    write_list(directory)


def a_second_file(directory: Path) -> None:
    shutil.copy(directory / "model.safetensors", directory / "old.safetensors")


def half_a_file(directory: Path) -> None:
    content = (directory / "model.safetensors").read_bytes()
    (directory / "model.safetensors").write_bytes(content[: len(content) // 2])


def half_a_file_and_no_list(directory: Path) -> None:
    half_a_file(directory)
    (directory / FILE_NAME).unlink()


def gone(directory: Path) -> None:
    shutil.rmtree(directory)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (other_shape, r"the tensors of the draft differ .*: model\.norm\.weight is \(4,\), not"),
        (one_less, r"model\.norm\.weight is None, not"),
        (other_configuration, r"the config\.json of the draft differ.*: rms_norm_eps is 0\.5, not"),
        (a_second_file, r"old\.safetensors has the tensor .*, which another file has too"),
        (half_a_file, r"model\.safetensors is not as the training wrote it"),
        (half_a_file_and_no_list, r"SHA256SUMS cannot be read"),
        (gone, r"SHA256SUMS cannot be read"),
    ],
)
def test_it_refuses_and_the_draft_that_serves_is_untouched(
    draft_weights: Any, first: Path, second: Path, damage: Callable[[Path], None], reason: str
) -> None:
    loader, digest = loader_of(draft_weights, first), digest_of_list(second)
    damage(second)
    if damage in (other_shape, one_less, other_configuration):  # by who made the draft
        digest = digest_of_list(second)
    with pytest.raises((draft_weights.DraftRefused, DraftChanged), match=reason):
        loader.update_weights({"directory": str(second), "checksums_sha256": digest})
    loader.finish_weight_update()
    assert same(loader.model.served, load_of(first))


def test_the_list_itself_must_be_the_one_that_the_caller_has(
    draft_weights: Any, first: Path, second: Path
) -> None:
    loader, digest = loader_of(draft_weights, first), digest_of_list(second)
    shutil.copy(first / "model.safetensors", second / "model.safetensors")
    write_list(second)
    with pytest.raises(DraftChanged, match="is not the list that the training wrote"):
        loader.update_weights({"directory": str(second), "checksums_sha256": digest})


def test_a_broken_file_from_elsewhere_is_refused(draft_weights: Any, first: Path, second: Path) -> None:
    half_a_file_and_no_list(second)
    with pytest.raises(draft_weights.DraftRefused, match=r"model\.safetensors of the draft cannot be read"):
        loader_of(draft_weights, first).update_weights({"directory": str(second)})


def test_other_methods_and_the_target_are_left_alone(draft_weights: Any, first: Path, tmp_path: Path) -> None:
    """vLLM starts with them all the same; the caller is told why."""
    for method, directory, reason in (
        ("eagle3", first, "method eagle3; only draft_model"),
        ("draft_model", tmp_path / "org" / "name", "is no directory"),
    ):
        loader = made(draft_weights, directory, method)
        with pytest.raises(draft_weights.DraftRefused, match=reason):
            loader.init_transfer_engine(draft_weights.InitInfo(driftguard=True))
    loader = loader_of(draft_weights, first)
    loader.model = loader._default_model
    with pytest.raises(draft_weights.DraftRefused, match="begin with /start_draft_weight_update"):
        loader.start_weight_update()


def load_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
