"""The machine that is measured on."""

from __future__ import annotations

import platform
import shutil
import subprocess
from importlib import metadata

import torch
from driftguard_engine.kernels.cuda import compiler

from tests.gpu.check.rows import Machine
from tests.gpu.check.run import NoDevice


def find() -> tuple[torch.device, Machine]:
    """The current CUDA device. Raises NoDevice."""
    if not torch.cuda.is_available():
        raise NoDevice(
            f"gpu-check needs a GPU: torch {torch.__version__} sees no CUDA device on this machine."
        )
    device = torch.device("cuda", torch.cuda.current_device())
    properties = torch.cuda.get_device_properties(device)
    try:
        nvrtc, driver, bindings = compiler.nvrtc_version(), _driver(), metadata.version("cuda-bindings")
    except (compiler.KernelsUnavailable, ImportError) as missing:
        raise NoDevice(f"gpu-check cannot build kernels on {properties.name}: {missing}") from missing
    return device, Machine(
        gpu=properties.name,
        capability=f"{properties.major}.{properties.minor}",
        multiprocessors=properties.multi_processor_count,
        memory_gib=properties.total_memory / 2**30,
        l2_bytes=properties.L2_cache_size,
        driver=driver,
        python=platform.python_version(),
        torch=torch.__version__,
        nvrtc=nvrtc,
        bindings=bindings,
    )


def _driver() -> str:
    """Its version where nvidia-smi tells it, and the newest CUDA that it serves."""
    from cuda.bindings import driver

    driver.cuInit(0)
    _, version = driver.cuDriverGetVersion()
    serves = f"serves CUDA {version // 1000}.{version % 1000 // 10}"
    program = shutil.which("nvidia-smi")
    if program is None:
        return serves
    asked = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    said = subprocess.run(asked, capture_output=True, text=True, timeout=30, check=False).stdout.split()
    return f"{said[0]}, {serves}" if said else serves
