"""Kernels that answer as the reference pass the test at start; one that does not is refused by name."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from driftguard_engine.kernels import layer_self_test, self_test
from driftguard_engine.kernels.cuda.compiler import KernelsUnavailable
from driftguard_engine.kernels.cuda.launcher import Argument, Launcher, Size
from driftguard_engine.models.llama import LlamaModel
from torch import Tensor

from tests.engine.core.tiny import new_module
from tests.engine.kernels.emulated import SOURCES, Emulated
from tests.engine.kernels.layer_cases import DTYPES, MODEL_HEADS
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
        ("verify_block_bf16", -2, r"accepted of torch\.bfloat16 logits by the block rule"),
        ("row_cutoffs_bf16", -5, r"cut_token of shared rows of torch\.bfloat16"),
        ("row_cutoffs_fp32", -5, r"cut_token of shared rows of torch\.float32"),
        ("row_cutoffs_fp32", -4, "normaliser of shared rows"),
        ("look_up_ngrams_int32", -1, r"n-gram drafts of torch\.int32"),
        ("look_up_ngrams_int64", -1, r"n-gram drafts of torch\.int64"),
        ("begin_step", -1, "chosen of the draft's inputs of a step"),
        ("begin_step", -5, "drafted of the rows of a step"),
        ("feed_drafts", -2, "next of the draft's inputs of a step"),
        ("feed_drafts", -3, "fed of the rows of a step"),
        ("append_step", -1, "outputs of a step"),
        ("append_step", -2, "ended of the slots of a step"),
        ("append_step", -3, "lengths of the slots of a step"),
        ("append_step", -5, "token_ids of the slots of a step"),
    ],
)
def test_a_kernel_that_answers_wrong(module: Module, kernel: str, output: int, said: str) -> None:
    with pytest.raises(KernelsUnavailable, match=f"fail their self-test: {said}"):
        self_test.check(Broken(Emulated(module), kernel, output), CPU)


@pytest.mark.parametrize(
    ("dtype", "heads"),
    [
        (torch.float32, [*MODEL_HEADS, *product(range(1, 9), (16, 32, 64, 96, 128, 256))]),
        (torch.bfloat16, [*MODEL_HEADS, (2, 96)]),
        (torch.float16, [*MODEL_HEADS, (2, 96)]),
    ],
    ids=["float32", "bfloat16", "float16"],
)
def test_kernels_of_a_layer_that_answer_right(
    module: Module, dtype: torch.dtype, heads: list[tuple[int, int]]
) -> None:
    for group, dim in heads:
        layer_self_test.check(Emulated(module), dtype, group, dim, CPU)


@dataclass(frozen=True)
class Misled:
    """The kernels whose names begin with `kernel` get other arguments."""

    launcher: Launcher
    kernel: str
    change: Callable[[Sequence[Argument]], Sequence[Argument]]

    def launch(self, kernel: str, grid: Size, block: int, arguments: Sequence[Argument]) -> None:
        given = self.change(arguments) if kernel.startswith(self.kernel) else arguments
        self.launcher.launch(kernel, grid, block, given)


def _opposite_rotation(arguments: Sequence[Argument]) -> Sequence[Argument]:
    *before, cos, sin, positions, length, keys, values, queries = arguments
    assert isinstance(sin, Tensor)
    return [*before, cos, -sin, positions, length, keys, values, queries]


def _rotation_of_the_next_position(arguments: Sequence[Argument]) -> Sequence[Argument]:
    *before, cos, sin, positions, length, keys, values, queries = arguments
    assert isinstance(cos, Tensor)
    assert isinstance(sin, Tensor)
    return [*before, cos.roll(-1, 0), sin.roll(-1, 0), positions, length, keys, values, queries]


def _ends_moved(by: int) -> Callable[[Sequence[Argument]], Sequence[Argument]]:
    """In attention, of the sequences that did not just begin."""

    def change(arguments: Sequence[Argument]) -> Sequence[Argument]:
        queries, keys, values, slots, starts, *rest = arguments
        assert isinstance(starts, Tensor)
        return [queries, keys, values, slots, torch.where(starts > 0, starts + by, starts), *rest]

    return change


def _natural_logarithm(arguments: Sequence[Argument]) -> Sequence[Argument]:
    """Powers of two are taken of scores that are meant for powers of e."""
    return [np.float32(each * math.log(2)) if isinstance(each, np.float32) else each for each in arguments]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kernel", "change", "said"),
    [
        ("turn_and_store", _opposite_rotation, "rotated queries"),
        ("turn_and_store", _rotation_of_the_next_position, "rotated queries"),
        ("attend", _ends_moved(-1), "attention"),
        ("attend", _ends_moved(+1), "attention"),
        ("attend", _natural_logarithm, "attention"),
    ],
    ids=["rotation", "rotation's position", "position missing", "key too many", "scale"],
)
def test_known_mistakes_of_a_layer(
    module: Module,
    dtype: torch.dtype,
    kernel: str,
    change: Callable[[Sequence[Argument]], Sequence[Argument]],
    said: str,
) -> None:
    for group, dim in MODEL_HEADS:
        with pytest.raises(KernelsUnavailable, match=f"fail their self-test: {said}"):
            layer_self_test.check(Misled(Emulated(module), kernel, change), dtype, group, dim, CPU)


@dataclass(frozen=True)
class Replaced:
    """`module` runs its kernels in place of the launcher's."""

    launcher: Launcher
    module: Module

    def launch(self, kernel: str, grid: Size, block: int, arguments: Sequence[Argument]) -> None:
        launcher = Emulated(self.module) if kernel in self.module.names else self.launcher
        launcher.launch(kernel, grid, block, arguments)


@pytest.mark.slow
@pytest.mark.parametrize("by", [-1, 1])
def test_splits_of_a_sequence_that_overlap_or_leave_a_gap(
    module: Module, compiled: Callable[..., Module], tmp_path: Path, by: int
) -> None:
    shutil.copytree(SOURCES[0].parent, tmp_path, dirs_exist_ok=True)
    edited = [tmp_path / "attention.cu", tmp_path / "attention_fma.cu"]
    for path in edited:
        text, right = path.read_text(), "const int first = piece.split * SPLIT"
        assert text.count(right) == 1, f"{path.name} has {right!r} {text.count(right)} times"
        path.write_text(text.replace(right, f"const int first = piece.split * (SPLIT + {by})"))
    launcher = Replaced(Emulated(module), compiled(*edited))
    for dtype, (group, dim) in product(DTYPES, MODEL_HEADS):
        with pytest.raises(KernelsUnavailable, match="fail their self-test: attention"):
            layer_self_test.check(launcher, dtype, group, dim, CPU)


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
