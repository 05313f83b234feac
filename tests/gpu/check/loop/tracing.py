"""Traces steps: the calls that wait for the device, and the kernels that run."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from driftguard_engine.core import FinishedRequest
from driftguard_engine.engine import Engine
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from tests.gpu.check.loop.serving import Load, ServingFailed, decoding, serve
from tests.gpu.check.rows import Breakdown, KernelTime, Synchronisations

STEPS, SETTLING_STEPS = 24, 10
_WINDOW = "measured steps"
_BOTH = [ProfilerActivity.CPU, ProfilerActivity.CUDA]

# The first that fits, in this order: a fused attention may have GEMM in its name.
GROUPS = {
    "verification and draft draws": r"draw_drafts|verify_chain|row_statistics|cutoff|look_up_ngrams",
    "attention": r"attend|combine_splits|attention|fmha|flash|softmax|sdpa|mha",
    "matrix products": r"gemm|gemv|nvjet|cutlass|cublas|splitk|xmma|matmul|dot_kernel|linear_",
    "the state of the rows": r"begin_step|feed_drafts|append_step",
    "norms, rotation, gate": r"norm|turn_and_store|gate_|silu",
    "copies and fills": r"memcpy|memset|copy|fill|catarray",
}
REST = "torch's indexing and arithmetic"

_WAITS = re.compile(r"^cu(da)?(Stream|Device|Ctx)Synchronize|^cu(da)?Memcpy(?!.*Async)")
_READBACK = re.compile(r"^cu(da)?EventSynchronize")
_ALLOCATION = re.compile(r"^cu(da)?(Malloc|Free|HostAlloc|HostFree|MemAlloc|MemFree|MemCreate|HostRegister)")


def group_of(kernel: str) -> str:
    name = kernel.lower()
    return next((group for group, pattern in GROUPS.items() if re.search(pattern, name)), REST)


def count_waits(names: Iterable[str]) -> tuple[dict[str, int], int, int]:
    """Of the calls of a run time or a driver: those that wait, waits for an event, allocations."""
    called = list(names)
    waits = dict(Counter(name for name in called if _WAITS.match(name)))
    return waits, sum(map(bool, map(_READBACK.match, called))), sum(map(bool, map(_ALLOCATION.match, called)))


def attach_profiler() -> None:
    """To be called before the graphs are captured that are to be looked into."""
    with profile(activities=_BOTH):
        pass


def count_synchronisations(engine: Engine, load: Load, what: str) -> Synchronisations:
    """Steps under torch's debug mode, which refuses what waits, and again under a profiler that counts."""
    refused: str | None = None
    try:
        with decoding(engine, load, 1, SETTLING_STEPS, []) as room:
            torch.cuda.set_sync_debug_mode("error")
            try:
                _steps(engine, min(room, STEPS))
            finally:
                torch.cuda.set_sync_debug_mode("default")
    except ServingFailed as failed:
        refused = str(failed)
    try:
        calls, steps = _calls(engine, load)
    except ServingFailed as problem:
        return Synchronisations(what, STEPS, refused, uncounted=str(problem))
    waits, readbacks, allocations = count_waits(calls)
    return Synchronisations(what, steps, refused, waits, readbacks, allocations)


def break_down(engine: Engine, load: Load, what: str) -> Breakdown:
    """Kernels of a step, by their own durations; what is left of a step that nobody watched are gaps."""
    unwatched = serve(engine, load, STEPS, seed=3, settling=SETTLING_STEPS)
    ended: list[FinishedRequest] = []
    with decoding(engine, load, 4, SETTLING_STEPS, ended) as room:
        steps = min(room, STEPS)
        torch.cuda.synchronize()
        with profile(activities=_BOTH) as traced:
            _steps(engine, steps)
            torch.cuda.synchronize()
    spent: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for event in _events(traced):
        if event.device_type == DeviceType.CUDA:
            spent[event.name] += event.time_range.elapsed_us()
            counts[event.name] += 1
    if not spent:
        raise ServingFailed("the profiler saw no kernel")
    groups: dict[str, float] = defaultdict(float)
    for name, microseconds in spent.items():
        groups[group_of(name)] += microseconds / steps
    kernels = [KernelTime(name, counts[name] / steps, took / steps) for name, took in spent.items()]
    kernels.sort(key=lambda kernel: -kernel.microseconds)
    return Breakdown(what, unwatched.milliseconds, kernels, dict(groups))


def _steps(engine: Engine, count: int) -> None:
    for _ in range(count):
        for output in engine.step():
            if output.finished is not None:
                raise ServingFailed(output.finished.error or output.finished.finish_reason)


def _calls(engine: Engine, load: Load) -> tuple[list[str], int]:
    """Names of all calls on the host inside steps; the profiler itself waits, but outside of them."""
    with decoding(engine, load, 2, SETTLING_STEPS, []) as room:
        steps = min(room, STEPS)
        with profile(activities=_BOTH) as traced, record_function(_WINDOW):
            _steps(engine, steps)
    on_host = [event for event in _events(traced) if event.device_type == DeviceType.CPU]
    windows = [event.time_range for event in on_host if event.name == _WINDOW]
    if len(windows) != 1:
        raise ServingFailed(f"the profiler shows {len(windows)} windows of steps")
    begin, end = windows[0].start, windows[0].end
    names = [event.name for event in on_host if begin <= event.time_range.start <= end]
    if not any(name.startswith(("cuda", "cu")) for name in names):
        raise ServingFailed("the profiler shows no call of CUDA")
    return names, steps


def _events(traced: Any) -> list[Any]:
    return list(traced.events() or [])
