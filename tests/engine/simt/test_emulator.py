"""The emulator computes what CUDA defines, and says so where a kernel leaves that ground."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.engine.simt.emulator import EXAMPLES, CompilationFailed, KernelFault, Module, compile_kernels
from tests.engine.simt.memory import guarded

SEEDS = range(4)


@pytest.fixture(scope="module")
def examples(compiled: Callable[..., Module]) -> Module:
    return compiled(EXAMPLES)


def line_of(text: str, nth: int = 0) -> str:
    lines = EXAMPLES.read_text().splitlines()
    return f"examples.cu:{[number for number, line in enumerate(lines, 1) if text in line][nth]}"


def run(module: Module, name: str, args: list[Any], **options: Any) -> list[Any]:
    module.launch(name, **{"grid": (1,), "block": (1,), **options}, args=args)
    return args


@pytest.mark.parametrize("seed", SEEDS)
def test_a_block_adds_in_the_order_of_its_shuffles(examples: Module, seed: int) -> None:
    rows = np.random.default_rng(7).random((3, 1000), dtype=np.float32)
    sums = np.zeros(3, np.float32)
    examples.launch("sum_rows", grid=(3,), block=(256,), args=[rows, np.int32(1000), sums], seed=seed)

    lanes = np.pad(rows, ((0, 0), (0, 24))).reshape(3, 4, 256)
    values = np.zeros((3, 256), np.float32)
    for i in range(4):
        values += lanes[:, i]
    assert np.array_equal(sums, halved(np.pad(halved(values.reshape(3, 8, 32)), ((0, 0), (0, 24)))))


def halved(values: Any) -> Any:
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_last_block_sees_what_all_others_wrote(examples: Module, seed: int) -> None:
    values = np.arange(1000, dtype=np.uint32)
    for _ in range(2):  # the counter of blocks is left as it was found
        partial, total = np.zeros(5, np.uint32), np.zeros(1, np.uint32)
        args = [values, np.uint32(1000), partial, total]
        examples.launch("sum_all", grid=(5,), block=(64,), args=args, seed=seed)
        assert total[0] == 499_500


def test_dynamic_shared_memory_and_blocks_of_two_dimensions(examples: Module) -> None:
    values, out = np.arange(96, dtype=np.float64), np.zeros(96)
    run(examples, "reverse", [values, out], block=(8, 12), shared_bytes=96 * 8)
    assert np.array_equal(out, values[::-1])


def test_structures_and_vectors(examples: Module) -> None:
    class Scaled(ctypes.Structure):
        _fields_ = (("factor", ctypes.c_float), ("offset", ctypes.c_uint64))

    # The product needs more bits than a float has: rounding it before the addition gives 0.
    factor = np.float32(1 + 2**-12)
    values = np.array([[factor, 0.0, -0.0, 4.0]], np.float32)
    out = np.zeros_like(values)
    run(examples, "scale", [values, out, Scaled(factor, 0)])
    assert np.array_equal(out, np.array([[factor * factor, 0.0, 0.0, -4.0]], np.float32))
    assert not np.signbit(out[0, 1])


def test_votes_of_a_warp(examples: Module) -> None:
    lanes = np.arange(32)
    values = (lanes % 3 - 1).astype(np.int32)
    out = np.zeros((32, 11), np.uint32)
    run(examples, "warp_votes", [values, out], block=(32,))

    def mask(chosen: Any) -> int:
        return int((1 << lanes[chosen]).sum())

    assert (out[:, 0] == mask(values > 0)).all()
    assert out[:, 1].tolist() == [mask(values == value) for value in values]
    assert (out[:, 2] == np.uint32(values.sum() % 2**32)).all()
    assert (out[:, 3] == 2**32 - 1).all()  # unsigned
    assert (out[:, 4] == (values > 0).sum()).all()
    assert np.array_equal(out[:, 5].view(np.int32), values[lanes ^ 5])
    assert np.array_equal(out[:, 6].view(np.int32), values[np.where(lanes % 8 < 3, lanes, lanes - 3)])
    assert np.array_equal(out[:, 7], np.where(lanes < 16, 0, 16))
    assert (out[:, 8:].view(np.int32) == [values.sum(), -1, 1]).all()


# --- races: some seed shows them -------------------------------------------------------------------------


def results(module: Module, name: str, make: Callable[[], list[Any]], **options: Any) -> set[bytes]:
    """The bytes of the last argument, over some seeds."""
    return {run(module, name, make(), seed=seed, **options)[-1].tobytes() for seed in SEEDS}


def test_a_missing_barrier_shows(examples: Module) -> None:
    values = np.arange(64, dtype=np.float32)
    found = results(examples, "lacks_barrier", lambda: [values, np.zeros(64, np.float32)], block=(64,))
    assert found != {values[::-1].tobytes()}
    assert len(found) > 1


def test_a_missing_atomic_shows(examples: Module) -> None:
    found = results(examples, "lacks_atomic", lambda: [np.zeros(1, np.uint32)], block=(64,))
    assert np.uint32(64).tobytes() not in found


def test_shared_memory_holds_nothing_at_first(examples: Module) -> None:
    found = results(examples, "reads_unset_shared", lambda: [np.zeros(1, np.float32)])
    assert np.float32(1).tobytes() not in found
    assert len(found) > 1


def test_blocks_run_in_any_order(examples: Module) -> None:
    assert len(results(examples, "depends_on_block_order", lambda: [np.zeros(1, np.int32)], grid=(8,))) > 1


def test_a_seed_repeats_a_run(examples: Module) -> None:
    values = np.arange(64, dtype=np.float32)
    first, second = (
        run(examples, "lacks_barrier", [values, np.zeros(64, np.float32)], block=(64,), seed=3)
        for _ in range(2)
    )
    assert np.array_equal(first[1], second[1], equal_nan=True)


# --- what would hang ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "said"),
    [
        (
            "barrier_in_branch",
            [
                "40 threads (first: 0) wait in __syncthreads",
                line_of("the line that the test expects"),
                "24 threads (first: 40) have exited",
            ],
        ),
        ("two_barriers", ["different barriers", "40 threads (first: 0)", "24 threads (first: 40)"]),
        (
            "shuffle_in_branch",
            ["7 threads (first: 0) wait in __shfl_sync with mask 0xffffffff", "wait in __syncwarp"],
        ),
        ("lane_outside_mask", ["mask 0x0000ffff lacks the lane", line_of("__shfl_sync(0xffffu")]),
    ],
)
def test_threads_that_do_not_meet(examples: Module, name: str, said: list[str]) -> None:
    with pytest.raises(KernelFault) as caught:
        run(examples, name, [np.zeros(64, np.int32)], block=(64,))
    for text in (f"{name}, block (0, 0, 0), thread (", *said):
        assert text in str(caught.value)

    # The module goes on working.
    out = np.zeros(256, np.float32)
    run(examples, "many_barriers", [out, np.int32(20)], block=(256,))
    assert np.array_equal(out, np.roll(np.arange(256, dtype=np.float32), -20))


def test_waiting_for_another_block_ends(examples: Module) -> None:
    with pytest.raises(KernelFault, match=r"still running .* at .*examples\.cu:\d+"):
        run(examples, "waits_for_other_block", [np.zeros(1, np.int32)], grid=(2,), limit_seconds=0.02)


# --- memory ---------------------------------------------------------------------------------------------


def test_reads_outside_of_an_array(examples: Module) -> None:
    array, out = np.zeros(64, np.int32), np.zeros(1, np.int32)
    line = line_of("out[0] = in[at]")
    with pytest.raises(KernelFault, match=f"argument 0 0 bytes past the end of its 256, at .*{line}"):
        run(examples, "reads_at", [array, np.int32(64), out], end="end")
    with pytest.raises(KernelFault, match=f"argument 0 4 bytes before it, at .*{line}"):
        run(examples, "reads_at", [array, np.int32(-1), out], end="start")
    odd = np.zeros(63, np.int32)
    with pytest.raises(KernelFault, match="0 bytes past the end of its 252"):
        run(examples, "reads_at", [odd, np.int32(63), out], alignment=4)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("at", [-1, 63])
def test_writes_outside_of_an_array_at_both_ends(examples: Module, seed: int, at: int) -> None:
    with pytest.raises(KernelFault, match=r"argument 0|beside the array of argument 0"):
        run(examples, "writes_at", [np.zeros(63, np.int32), np.int32(at)], seed=seed)


@pytest.mark.parametrize(
    ("name", "args", "shared_bytes", "said"),
    [
        ("writes_const", [np.zeros(1, np.int32)], 0, "through a pointer to const"),
        ("overruns_shared", [np.zeros(1, np.int32), np.int32(8)], 0, "an index outside of an array"),
        (
            "overruns_dynamic",
            [np.zeros(1, np.int32), np.int32(8)],
            32,
            "0 bytes past the end of dynamic shared",
        ),
        ("misaligned", [np.zeros(32, np.int8), np.zeros(4, np.float32)], 0, "a misaligned access"),
        ("deep_stack", [np.zeros(1, np.int32), np.int32(9)], 0, "the stack of a thread"),
    ],
)
def test_other_memory(examples: Module, name: str, args: list[Any], shared_bytes: int, said: str) -> None:
    with pytest.raises(KernelFault, match=said):
        run(examples, name, args, shared_bytes=shared_bytes)


def test_an_array_given_twice_is_one(examples: Module) -> None:
    both = np.arange(96, dtype=np.float64)
    run(examples, "reverse", [both, both], block=(96,), shared_bytes=96 * 8)
    assert np.array_equal(both, np.arange(96.0)[::-1])


def test_memory_that_outlives_a_launch(examples: Module) -> None:
    held = guarded(np.zeros(4, np.int32))
    run(examples, "writes_at", [held, np.int32(2)])
    assert held.array.tolist() == [0, 0, 1, 0]
    with pytest.raises(KernelFault):
        run(examples, "writes_at", [held, np.int32(4)])


# --- arguments ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ([np.zeros(1, np.int32)], "takes 2 arguments, got 1"),
        ([np.zeros(1, np.int32), 1], "argument 1 must be int32, got int 1"),
        ([np.zeros(1, np.int32), np.int64(1)], "argument 1 must be int32, got int64"),
        ([np.zeros(1, np.int32), np.uint32(1)], "argument 1 must be int32, got uint32"),
        ([np.int32(1), np.int32(1)], "argument 0 is a pointer, got int32"),
        ([np.zeros((4, 4), np.int32).T, np.int32(1)], "argument 0 is a pointer"),  # not contiguous
    ],
)
def test_arguments_that_do_not_fit(examples: Module, args: list[Any], said: str) -> None:
    with pytest.raises(TypeError, match=f"writes_at.*{said}"):
        run(examples, "writes_at", args)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"block": (1025,)}, "1 to 1024 threads, got 1025"),
        ({"grid": (1, 70_000)}, "cannot be launched"),
        ({"shared_bytes": 300_000}, "at most 232448 bytes of shared memory"),
    ],
)
def test_launches_that_no_gpu_takes(examples: Module, options: dict[str, Any], said: str) -> None:
    with pytest.raises(KernelFault, match=said):
        run(examples, "writes_at", [np.zeros(1, np.int32), np.int32(0)], **options)


def test_a_kernel_that_does_not_compile(compiled: Callable[..., Module], tmp_path: Path) -> None:
    path = tmp_path / "broken.cu"
    path.write_text('\nextern "C" __global__ void broken(int* out) { *out = nowhere; }\n')
    with pytest.raises(CompilationFailed, match=r"broken\.cu:2:.*nowhere"):
        compile_kernels([path], tmp_path)
