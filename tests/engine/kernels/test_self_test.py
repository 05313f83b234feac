"""Kernels that answer as the reference pass the test at start; one that does not is refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch
from driftguard_engine.kernels import layer_self_test, self_test
from driftguard_engine.kernels.cuda.compiler import KernelsUnavailable
from driftguard_engine.kernels.cuda.launcher import Argument, Launcher, Size
from driftguard_engine.models.llama import LlamaModel
from torch import Tensor

from tests.engine.core.tiny import new_module
from tests.engine.kernels.emulated import Emulated
from tests.engine.simt.emulator import Module

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Broken:
    """One kernel adds 1 to the last number of one of its outputs."""

    launcher: Launcher
    kernel: str
    output: int  # counted from the last argument

    def launch(self, kernel: str, grid: Size, block: int, arguments: Sequence[Argument]) -> None:
        self.launcher.launch(kernel, grid, block, arguments)
        if kernel == self.kernel:
            output = arguments[self.output]
            assert isinstance(output, Tensor)
            output.view(-1)[-1] += 1


def test_kernels_that_answer_right(module: Module) -> None:
    self_test.check(Emulated(module), CPU)


@pytest.mark.parametrize(
    ("kernel", "output", "said"),
    [
        ("draw_drafts_bf16", -1, r"drafts of torch\.bfloat16 logits"),
        ("verify_chain_bf16", -1, r"status of torch\.bfloat16 logits"),
        ("verify_chain_bf16", -2, r"accepted of torch\.bfloat16 logits"),
        ("verify_chain_bf16", -3, r"tokens of torch\.bfloat16 logits"),
        ("look_up_ngrams_int32", -1, "n-gram draft lengths"),
        ("look_up_ngrams_int64", -2, "n-gram drafts"),
    ],
)
def test_a_kernel_that_answers_wrong(module: Module, kernel: str, output: int, said: str) -> None:
    with pytest.raises(KernelsUnavailable, match=f"fail their self-test: {said}"):
        self_test.check(Broken(Emulated(module), kernel, output), CPU)


def test_kernels_of_a_layer_that_answer_right(module: Module) -> None:
    for dtype, group, dim in (
        (torch.bfloat16, 4, 128),
        (torch.float16, 7, 64),
        (torch.float32, 1, 64),
        (torch.bfloat16, 2, 96),
    ):
        layer_self_test.check(Emulated(module), dtype, group, dim, CPU)


@pytest.mark.parametrize(
    ("kernel", "output", "said"),
    [
        ("turn_and_store_fp32", -1, "rotated queries"),
        ("turn_and_store_fp32", -2, "stored values"),
        ("turn_and_store_fp32", -3, "stored keys"),
        ("attend_by_fma_fp32", -1, "attention"),
        ("combine_splits_fp32", -1, "attention"),
        ("add_and_norm_fp32", -2, "sum"),
        ("add_and_norm_fp32", -1, "norm"),
        ("gate_fp32", -1, "gate"),
    ],
)
def test_a_kernel_of_a_layer_that_answers_wrong(module: Module, kernel: str, output: int, said: str) -> None:
    with pytest.raises(KernelsUnavailable, match=f"fail their self-test: {said} in torch.float32 is off"):
        layer_self_test.check(Broken(Emulated(module), kernel, output), torch.float32, 1, 16, CPU)


def test_torch_computes_the_layers_that_the_kernels_compute_wrong(module: Module) -> None:
    llama = new_module("llama", seed=1, vocabulary=97, head_dim=16)
    assert LlamaModel(llama, 1, 8, launcher=Emulated(module)).kernels_obstacle is None
    model = LlamaModel(llama, 1, 8, launcher=Broken(Emulated(module), "attend_by_fma_fp32", -1))
    assert "fail their self-test: attention" in str(model.kernels_obstacle)
    ids = torch.tensor([[1, 2, 3]])
    assert torch.isfinite(model.decode(ids, torch.tensor([0]), torch.tensor([0]))).all()


@pytest.mark.parametrize(
    ("kernel", "said"),
    [("linear_1_fp16", "linear layer"), ("linear_4_fp16", "linear layer"), ("linear_gated_2_fp16", "gated")],
)
def test_a_linear_layer_that_answers_wrong(module: Module, kernel: str, said: str) -> None:
    with pytest.raises(KernelsUnavailable, match=f"fail their self-test: {said}.* in torch.float16 is off"):
        layer_self_test.check(Broken(Emulated(module), kernel, -1), torch.float16, 1, 64, CPU)
