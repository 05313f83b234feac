"""Microseconds on a device: CUDA graphs between events, the median of many replays."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence

import torch
from driftguard_engine.decode.graph_capture import capturing

from tests.gpu.check.rows import Bandwidth
from tests.gpu.check.run import Run

REPLAYS = 30
WARM_UPS = 3
_COLD_BYTES_PER_L2 = 3  # that pass through the cache before the same ones are read again
LEAST_CALLS = 20  # in a graph: its own start, which is not the kernels', is shared out among them

Call = Callable[[], object]


def graph_microseconds(calls: Sequence[Call], replays: int = REPLAYS) -> float:
    """Of one call, captured in turn: give calls on different data, or the same one again and again.

    Raises RuntimeError (a call that cannot be captured).
    """
    queued = [calls[index % len(calls)] for index in range(max(LEAST_CALLS, len(calls)))]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in queued[:WARM_UPS]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing(graph, torch.cuda.graph_pool_handle()):
        for call in queued:
            call()
    return _median(graph.replay, replays) / len(queued)


def eager_microseconds(calls: Sequence[Call], repeats: int = REPLAYS) -> float:
    """Of one call, for what cannot be captured."""
    queued = itertools.cycle(calls)

    def call_next() -> object:
        return next(queued)()

    return _median(call_next, repeats)


def copy_bytes_per_second(device: torch.device, size: int = 2**30) -> float:
    """Of a large copy on the device, bytes read plus bytes written: what memory can do.

    Not in a graph: an H200 copies 2.7 TB/s there, by an engine for copies, and 4.3 TB/s by a kernel.
    """
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    sink = torch.empty_like(source)
    return 2 * size / (eager_microseconds([lambda: sink.copy_(source)], repeats=10) * 1e-6)


def cold_sets(device: torch.device, set_bytes: int) -> int:
    """Of data of this size on a CUDA device: how many, so that the cache holds none when it is read again."""
    held = torch.cuda.get_device_properties(device).L2_cache_size
    return max(2, 1 + _COLD_BYTES_PER_L2 * held // set_bytes)


def bandwidth_of(run: Run, device: torch.device) -> float:
    """`copy_bytes_per_second`, as an earlier part measured it."""
    known = run.found().newest(Bandwidth)
    return copy_bytes_per_second(device) if known is None else known.bytes_per_second


def _median(call: Call, repeats: int) -> float:
    for _ in range(WARM_UPS):
        call()
    times: list[float] = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(1e3 * begin.elapsed_time(end))
    return statistics.median(times)
