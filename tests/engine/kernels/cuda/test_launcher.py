"""Arguments reach the kernel whose parameters they were packed for: launched here through the emulator."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from driftguard_engine.kernels.cuda import loader
from driftguard_engine.kernels.cuda.compiler import KernelsUnavailable
from driftguard_engine.kernels.cuda.launcher import Kernel, LaunchFailed, Size, signature_of

from tests.engine.simt.emulator import EXAMPLES, KernelFault, Module

SIGNATURE = "PiqfdIP"
CPU = torch.device("cpu")


@pytest.fixture
def kernel(compiled: Callable[..., Module]) -> Kernel:
    module = compiled(EXAMPLES)

    def launch(grid: Size, block: Size, shared_bytes: int, parameters: int) -> str | None:
        pointers = (ctypes.c_void_p * len(SIGNATURE)).from_address(parameters)
        try:
            module.launch_packed("parameters", grid, block, pointers, shared_bytes)
        except KernelFault as fault:
            return str(fault)
        return None

    return Kernel("parameters", SIGNATURE, CPU, launch)


def call(kernel: Kernel, *args: Any) -> None:
    kernel.launch((2, 1, 1), (64, 1, 1), args)


def test_each_argument_arrives_as_its_type(kernel: Kernel) -> None:
    values, out = torch.arange(100.0), torch.zeros(100)
    call(kernel, values, 100, 2**33, 0.5, 1.25, 7, out)
    assert torch.equal(out, values * 0.5 + 1.25 + 2.0**33)
    call(kernel, values, 100, -3, 1.0, -0.5, 7, out)  # the same memory, with other values
    assert torch.equal(out, values - 0.5 - 3)


def test_what_does_not_fit_is_refused(kernel: Kernel) -> None:
    values, out = torch.zeros(4), torch.zeros(4)
    for args in (
        (values, 4, 0, 1.0, 0.0, 7),
        (values, 4, 0, 1.0, 0.0, 7, out, 1),
        (values, 2**31, 0, 1.0, 0.0, 7, out),
        (values, 4.0, 0, 1.0, 0.0, 7, out),
        (values, 4, 0, 1.0, 0.0, -1, out),
    ):
        with pytest.raises(struct.error):
            call(kernel, *args)
    elsewhere = Kernel("parameters", SIGNATURE, torch.device("cuda", 1), lambda *_: None)
    with pytest.raises(ValueError, match="parameters: a tensor is on cpu, the kernel on cuda:1"):
        call(elsewhere, values, 4, 0, 1.0, 0.0, 7, out)


def test_the_driver_s_error_names_the_kernel(kernel: Kernel) -> None:
    with pytest.raises(LaunchFailed, match=r"parameters.*accesses memory"):
        call(kernel, torch.zeros(4), 4, 0, 1.0, 0.0, 7, None)


def test_the_signature_follows_from_the_types() -> None:
    given = [torch.zeros(1), None, np.int32(1), np.uint32(1), np.int64(1), np.uint64(1)]
    assert signature_of([*given, np.float32(1), np.float64(1)]) == "PPiIqQfd"
    for wrong in (1, 1.0, True, np.int16(1)):
        with pytest.raises(TypeError, match="argument 1 must be"):
            signature_of([None, wrong])  # type: ignore[list-item]


def test_without_a_device() -> None:
    with pytest.raises(KernelsUnavailable, match="need a CUDA device, got cpu"):
        loader.kernels(CPU)
    if not torch.cuda.is_available():
        with pytest.raises(KernelsUnavailable, match="torch sees no CUDA device"):
            loader.kernels(torch.device("cuda"))
