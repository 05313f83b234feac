"""Tensors reach SGLang's unpickler as they are in the draft's files."""

from __future__ import annotations

import base64
import io
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from driftguard.retraining.engines import sglang_tensors
from driftguard.retraining.training.draft_files import DraftRefused, tensors_of
from tests.retraining.sglang_stub import SafeUnpickler


@pytest.mark.parametrize("kind", [torch.float32, torch.float16, torch.bfloat16])
def test_every_type_and_shape_arrives_at_each_rank(tmp_path: Path, kind: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(1)
    shapes = {"matrix": (3, 5), "cube": (2, 3, 4), "one": (1,), "number": (), "empty": (0, 4)}
    made = {name: torch.randn(shape, generator=generator).to(kind) for name, shape in shapes.items()}
    save_file(made, tmp_path / "model.safetensors")
    tensors = list(tensors_of(tmp_path).values())
    sglang_tensors.check(tensors)
    body = json.loads(sglang_tensors.body(tensors, 2, {"selector": "draft", "flush_cache": False}))
    assert (body["selector"], body["flush_cache"]) == ("draft", False)
    assert len(body["serialized_named_tensors"]) == 2
    for payload in body["serialized_named_tensors"]:
        found = dict(SafeUnpickler(io.BytesIO(base64.b64decode(payload))).load())
        assert found.keys() == made.keys()
        for name, tensor in made.items():
            assert (found[name].dtype, found[name].shape) == (kind, tensor.shape)
            assert torch.equal(found[name], tensor)


def test_bodies_are_bounded_and_no_tensor_is_divided(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang_tensors, "BODY_BYTES", 100)
    save_file({name: torch.ones(10) for name in "abcde"} | {"f": torch.ones(99)}, tmp_path / "m.safetensors")
    tensors = sorted(tensors_of(tmp_path).values(), key=lambda tensor: tensor.name)
    names = [[tensor.name for tensor in part] for part in sglang_tensors.parts_of(tensors, 1)]
    assert names == [["a", "b"], ["c", "d"], ["e"], ["f"]]
    assert len(sglang_tensors.parts_of(tensors, 2)) == 6


def test_a_tensor_that_no_pickle_can_hold_is_refused(tmp_path: Path) -> None:
    save_file({"large": torch.ones(4)}, tmp_path / "m.safetensors")
    (tensor,) = tensors_of(tmp_path).values()
    with pytest.raises(DraftRefused, match="the tensor large has 4294967296 bytes, more than"):
        sglang_tensors.check([replace(tensor, shape=(1 << 30,), size=1 << 32)])
