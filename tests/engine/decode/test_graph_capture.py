"""A capture in a CUDA graph that fails leaves the thread's stream and torch's allocator as they were."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driftguard_engine.decode.graph_capture import capturing, first_cause

POOL: Any = (0, 7)
DEVICE_INDEX = 1
INVALIDATED = "CUDA error: operation failed due to a previous error during capture"


class _Device:
    """torch.cuda as far as a capture goes: its graph forgets the stream where the capture was broken."""

    def __init__(self, *, invalidated: bool) -> None:
        self._invalidated = invalidated
        self.stream = "default"
        self.allocating = False
        self.released: list[tuple[int, tuple[int, int]]] = []

    def graph(self, graph: object, pool: object, capture_error_mode: str) -> _Device:
        assert (pool, capture_error_mode) == (POOL, "thread_local")
        return self

    def __enter__(self) -> None:
        self.stream, self.allocating = "capture", True

    def __exit__(self, *_: object) -> None:
        if self._invalidated:
            raise RuntimeError(INVALIDATED)
        self.stream, self.allocating = "default", False

    def set_stream(self, stream: str) -> None:
        self.stream = stream

    def end_allocate(self, index: int, pool: object) -> None:
        assert (index, pool) == (DEVICE_INDEX, POOL)
        if not self.allocating:
            raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
        self.allocating = False

    def release(self, index: int, pool: tuple[int, int]) -> None:
        self.released.append((index, pool))


def install(device: _Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "graph", device.graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: device.stream)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE_INDEX)
    monkeypatch.setattr(torch.cuda, "set_stream", device.set_stream)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", device.end_allocate)
    monkeypatch.setattr(torch._C, "_cuda_releasePool", device.release)


@pytest.mark.parametrize("invalidated", [True, False])
def test_what_breaks_a_capture_is_told_and_nothing_of_it_stays(
    monkeypatch: pytest.MonkeyPatch, invalidated: bool
) -> None:
    """Broken by a call that CUDA refuses, or by one of Python alone, behind which the capture ends well."""
    device = _Device(invalidated=invalidated)
    install(device, monkeypatch)
    waits = ValueError("operation not permitted when stream is capturing")
    graph: Any = object()
    with pytest.raises((RuntimeError, ValueError)) as raised, capturing(graph, POOL):
        raise waits
    assert str(raised.value) == (INVALIDATED if invalidated else str(waits))
    assert first_cause(raised.value) is waits
    assert (device.stream, device.allocating) == ("default", False)
    assert device.released == ([(DEVICE_INDEX, POOL)] if invalidated else [])
