"""The loader speaks the driver's language: the real bindings, over a driver that this test builds."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from ctypes.util import find_library
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from driftguard_engine.kernels.cuda import compiler, loader
from driftguard_engine.kernels.cuda.compiler import KernelsUnavailable
from driftguard_engine.kernels.cuda.launcher import Argument, LaunchFailed

from tests.engine.simt.emulator import has_compiler

HERE = Path(__file__).parent
CUDA = torch.device("cuda", 0)
STREAM = 0x5EED

pytestmark = [
    pytest.mark.skipif(find_library("cuda") is not None, reason="a real driver is installed"),
    pytest.mark.skipif(not has_compiler(), reason="the driver's stand-in needs g++"),
]


class Calls(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int) for name in ("contexts_now", "contexts_retained", "modules", "loads")),
        *((name, ctypes.c_int) for name in ("attribute", "launches", "overlaps")),
        ("stream", ctypes.c_ulong),
    )


@pytest.fixture(scope="session")  # the bindings keep the first of this name that they find in the process
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """Found by the bindings, because a library of this name is in the process already."""
    path = tmp_path_factory.mktemp("driver") / "libcuda.so.1"
    options = ["-shared", "-fPIC", "-std=c++20", "-Wl,-soname,libcuda.so.1"]
    subprocess.run(["g++", *options, str(HERE / "fake_driver.cpp"), "-o", str(path)], check=True)
    return ctypes.CDLL(str(path), ctypes.RTLD_GLOBAL)


@pytest.fixture
def calls(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Calls]:
    monkeypatch.setenv("DRIFTGUARD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(loader, "_loaded", {})
    monkeypatch.setattr(loader, "read_sources", lambda: compiler.read_sources(HERE / "sources"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=STREAM))
    calls = Calls.in_dll(library, "fake_calls")
    ctypes.memset(ctypes.addressof(calls), 0, ctypes.sizeof(calls))
    yield calls
    assert calls.contexts_now == 0
    ctypes.c_int.in_dll(library, "fake_launch_result").value = 0


def arguments(values: torch.Tensor, out: torch.Tensor) -> list[Any]:
    # Addresses instead of tensors, because these are the CPU's.
    return [values.data_ptr(), len(values), 2**33, 0.5, 1.25, 7, out.data_ptr()]


def test_compiles_loads_and_launches_on_the_current_stream(calls: Calls, tmp_path: Path) -> None:
    kernels = loader.kernels(torch.device("cuda"))
    assert kernels.architecture == "sm_90a"
    assert kernels is loader.kernels(CUDA)  # loaded once
    assert (calls.contexts_retained, calls.modules) == (1, 2)
    assert len(list((tmp_path / "kernels").iterdir())) == 2

    kernel = kernels.kernel("blend", "PiqfdIP")
    assert (calls.loads, calls.attribute) == (1, 0)
    values, out = torch.arange(100.0), torch.zeros(100)
    kernel.launch((1, 1, 1), (128, 1, 1), arguments(values, out))
    assert (calls.launches, calls.stream, calls.overlaps) == (1, STREAM, 0)
    assert torch.equal(out, values + 1.25 + 2.0**33)

    # The same by name: prepared once, after the types of the first launch, and then as cheap.
    typed: list[Argument] = [
        np.uint64(values.data_ptr()),
        np.int32(100),
        np.int64(-3),
        np.float32(1),
        np.float64(-0.5),
    ]
    for launches in (2, 3):
        kernels.launch("blend", (1, 1, 1), 128, [*typed, np.uint32(7), np.uint64(out.data_ptr())])
        assert (calls.launches, calls.loads) == (launches, 2)
    assert torch.equal(out, 2 * values - 0.5 - 3)

    kernels.kernel("blend", "PiqfdIP", shared_bytes=100_000)
    assert calls.attribute == 100_000


@pytest.mark.parametrize(("capability", "overlaps"), [((8, 6), 0), ((9, 0), 1), ((12, 0), 1)])
def test_a_kernel_begins_beside_the_one_before_it_where_the_device_can(
    calls: Calls, monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], overlaps: int
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(loader, "BEGIN_EARLY", ("blen",))
    kernel = loader.kernels(CUDA).kernel("blend", "PiqfdIP")
    values, out = torch.arange(100.0), torch.zeros(100)
    for _ in range(2):
        kernel.launch((1, 1, 1), (128, 1, 1), arguments(values, out))
        assert calls.overlaps == overlaps
    assert torch.equal(out, values + 1.25 + 2.0**33)


def test_what_is_refused(calls: Calls, library: ctypes.CDLL) -> None:
    kernels = loader.kernels(CUDA)
    with pytest.raises(KernelsUnavailable, match="no kernel blur in csrc"):
        kernels.kernel("blur", "P")
    for signature in ("PiqfdI", "PiqfdIPP", "PiifdIP", "PqqfdIP"):
        with pytest.raises(KernelsUnavailable, match=f"blend has parameters .* signature '{signature}'"):
            kernels.kernel("blend", signature)

    kernel = kernels.kernel("blend", "PiqfdIP")
    ctypes.c_int.in_dll(library, "fake_launch_result").value = 701
    with pytest.raises(
        LaunchFailed, match=r"blend, .* of \(128, 1, 1\) threads.*: CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES"
    ):
        kernel.launch((1, 1, 1), (128, 1, 1), arguments(torch.zeros(1), torch.zeros(1)))


def test_too_old_a_device(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    with pytest.raises(KernelsUnavailable, match=r"need compute capability 8\.0"):
        loader.kernels(CUDA)
