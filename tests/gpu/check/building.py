"""Builds all kernels for the device: seconds to compile and to load, registers and memory of each."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch
from driftguard_engine.kernels.cuda import loader
from driftguard_engine.kernels.cuda.compiler import architecture, compile_source, read_sources

from tests.gpu.check.resources import Resources, resources


@dataclass(frozen=True, slots=True)
class Built:
    kernels: loader.Kernels
    first_start_seconds: float  # compiled and loaded
    later_start_seconds: float  # taken from the cache
    resources: list[Resources]


def build(device: torch.device) -> Built:
    """The cache must be empty. Raises KernelsUnavailable."""
    torch.zeros(1, device=device)  # starts CUDA, which is not counted
    begin = time.monotonic()
    kernels = loader.kernels(device)
    first = time.monotonic() - begin
    begin = time.monotonic()
    loader._load(device)
    later = time.monotonic() - begin
    target = architecture(torch.cuda.get_device_capability(device))
    with ThreadPoolExecutor() as pool:
        logs = [
            compiled.log for compiled in pool.map(lambda one: compile_source(one, target), read_sources())
        ]
    return Built(kernels, first, later, _told(logs))


def _told(logs: list[str]) -> list[Resources]:
    """What each kernel uses, from the compiler's log; nothing where its format is another one."""
    try:
        return [one for log in logs for one in resources(log)]
    except ValueError:
        return []
