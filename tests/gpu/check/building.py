"""Builds all kernels for the device: seconds to compile and to load, registers and memory of each."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import torch
from driftguard_engine.kernels.cuda import loader
from driftguard_engine.kernels.cuda.compiler import (
    OPTIONS,
    KernelsUnavailable,
    architecture,
    compile_source,
    read_sources,
)

from tests.gpu.check import machine
from tests.gpu.check.resources import resources
from tests.gpu.check.rows import Bandwidth, BuildTime, Checked, Resources
from tests.gpu.check.run import Run
from tests.gpu.check.timing import copy_bytes_per_second


def build(run: Run) -> None:
    """The cache of compiled kernels must be empty."""
    device, found = machine.find()
    run.add(found)
    for name, value in found.lines():
        run.say(f"{name}: {value}")
    torch.zeros(1, device=device)  # starts CUDA, which is not counted
    begin = time.monotonic()
    try:
        loader.kernels(device)
    except KernelsUnavailable as problem:
        run.add(Checked("build", str(problem), failed=True))
        run.say(f"build FAILED: {problem}")
        return
    first = time.monotonic() - begin
    begin = time.monotonic()
    loader._load(device)
    run.add(BuildTime(first, time.monotonic() - begin))
    run.say(f"compiled and loaded in {first:.1f} s")
    bandwidth = copy_bytes_per_second(device)
    run.add(Bandwidth(bandwidth))
    run.say(f"copy: {bandwidth / 1e12:.2f} TB/s, read and written")
    for one in _resources(run, device):
        run.add(one)
        if one.uses_local_memory:
            run.say(f"{one.kernel}: {one.stack_bytes} bytes of stack, {one.spill_bytes} spilled")


def _resources(run: Run, device: torch.device) -> list[Resources]:
    """What each kernel uses, from the compiler's log: empty where NVRTC has kept what it compiled."""
    target, anew = architecture(torch.cuda.get_device_capability(device)), (*OPTIONS, "--no-cache")
    with ThreadPoolExecutor() as pool:
        compiled = pool.map(lambda one: compile_source(one, target, anew), read_sources())
        try:
            return [one for each in compiled for one in resources(each.log)]
        except (ValueError, KernelsUnavailable) as problem:  # another format, another NVRTC
            run.add(Checked("registers and spills", f"unknown: {problem}", failed=False))
            return []
