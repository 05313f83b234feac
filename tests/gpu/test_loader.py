"""Kernels on a real device: loaded by the real driver, on torch's stream, inside a CUDA graph."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from driftguard_engine.kernels.cuda import compiler, loader
from driftguard_engine.kernels.cuda.compiler import KernelsUnavailable
from driftguard_engine.kernels.cuda.launcher import Argument
from torch import Tensor

from tests.engine.kernels import cuda as kernel_tests

SOURCES = Path(kernel_tests.__file__).parent / "sources"

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> loader.Kernels:
    monkeypatch.setenv("DRIFTGUARD_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(loader, "_loaded", {})
    monkeypatch.setattr(loader, "read_sources", lambda: compiler.read_sources(SOURCES))
    return loader.kernels(torch.device("cuda"))


def blend(kernels: loader.Kernels, values: Tensor, out: Tensor) -> None:
    numbers: list[Argument] = [np.int32(100), np.int64(-3), np.float32(0.5), np.float64(1.25), np.uint32(7)]
    kernels.launch("blend", (2, 1, 1), 64, [values, *numbers, out])


def test_launches_in_the_order_of_the_stream(kernels: loader.Kernels) -> None:
    values = torch.arange(100.0, device="cuda")
    out = torch.zeros(100, device="cuda")
    blend(kernels, values, out)
    assert torch.equal(out, values - 1.75)

    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(stream):  # what follows waits here, and on no other stream
        torch.cuda._sleep(20_000_000)  # type: ignore[no-untyped-call]
        late = values + 1
        blend(kernels, late, out)
    stream.synchronize()
    assert torch.equal(out, values - 0.75)


def test_is_captured_in_a_graph_without_waiting(kernels: loader.Kernels) -> None:
    values, out = torch.zeros(100, device="cuda"), torch.zeros(100, device="cuda")
    blend(kernels, values, out)  # found and loaded
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        blend(kernels, values, out)
    for first in (5.0, 9.0):
        values.copy_(torch.arange(first, first + 100))
        graph.replay()
        assert torch.equal(out.cpu(), torch.arange(first, first + 100) - 1.75)


def test_parameters_are_compared_with_the_compiled_kernel(kernels: loader.Kernels) -> None:
    with pytest.raises(KernelsUnavailable, match="blend has parameters"):
        kernels.kernel("blend", "PiqfdI")
    with pytest.raises(KernelsUnavailable, match="no kernel blur"):
        kernels.kernel("blur", "P")
