"""The CUDA kernels of one device: compiled (or taken from the cache) at first use, loaded by the driver."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from driftguard_engine.kernels.cuda.compiler import KernelsUnavailable, architecture, read_sources
from driftguard_engine.kernels.cuda.cubin_cache import cache_directory, cubin
from driftguard_engine.kernels.cuda.launcher import (
    Argument,
    Kernel,
    Size,
    offsets,
    raw_stream,
    signature_of,
    sizes,
)

logger = logging.getLogger(__name__)

# By the beginnings of their names: they begin while the kernel before them still runs, and wait for it by
# `await_the_kernel_before` (early.cuh).
BEGIN_EARLY = ("row_cutoffs", "verify_chain", "verify_block", "draw_drafts")
_CAPABILITY_TO_BEGIN_EARLY = 90

_STATIC_SHARED_BYTES = 48 * 1024  # what a block may use without raising the kernel's limit

_loaded: dict[int, Kernels] = {}
_loading = threading.Lock()


class Kernels:
    """Every kernel of csrc on one device. Made by `kernels`."""

    def __init__(self, device: torch.device, architecture: str, context: Any, modules: list[Any]) -> None:
        self.device, self.architecture = device, architecture
        self._context, self._modules = context, modules
        self._prepared: dict[str, Kernel] = {}

    def launch(self, kernel: str, grid: Size, block: int, arguments: Sequence[Argument]) -> None:
        """Queue a kernel, in blocks of `block` threads, without dynamic shared memory.

        Its first launch finds and loads it, by the types of the arguments, and must not be inside a capture.
        Raises KernelsUnavailable (at the first launch) and as `Kernel.launch`.
        """
        prepared = self._prepared.get(kernel)
        if prepared is None:
            prepared = self._prepared[kernel] = self.kernel(kernel, signature_of(arguments))
        prepared.launch(grid, (block, 1, 1), arguments)

    def kernel(self, name: str, signature: str, shared_bytes: int = 0) -> Kernel:
        """A kernel by name; call it once per call site. signature, shared_bytes: as `Kernel`.

        Raises KernelsUnavailable: no such kernel, or its parameters do not have these sizes.
        """
        driver = _driver()
        with _current(driver, self._context):
            function = self._function(driver, name)
            found = _parameters(driver, function)
            if found != list(zip(offsets(signature), sizes(signature), strict=True)):
                raise KernelsUnavailable(
                    f"{name} has parameters of (offset, size) {found}, not of the signature {signature!r}"
                )
            if shared_bytes > _STATIC_SHARED_BYTES:
                attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                _check(driver, driver.cuFuncSetAttribute(function, attribute, shared_bytes))
            # Loaded now: loading at the first launch would wait for the device, and fail inside a capture.
            _check(driver, driver.cuFuncLoad(function))
        capability = int(self.architecture.removeprefix("sm_").rstrip("af"))
        early = name.startswith(BEGIN_EARLY) and capability >= _CAPABILITY_TO_BEGIN_EARLY
        launch = _launcher(driver, function, self.device, early)
        return Kernel(name, signature, self.device, launch, shared_bytes)

    def _function(self, driver: Any, name: str) -> Any:
        for module in self._modules:
            status, function = driver.cuModuleGetFunction(module, name.encode())
            if status != driver.CUresult.CUDA_ERROR_NOT_FOUND:
                return _check(driver, (status, function))
        raise KernelsUnavailable(f"no kernel {name} in csrc")


def kernels(device: torch.device) -> Kernels:
    """All kernels, for this CUDA device; compiled and loaded once per process.

    Raises KernelsUnavailable: no CUDA device, no driver, no compiler, too old a device, sources that do not
    compile.
    """
    if device.type != "cuda":
        raise KernelsUnavailable(f"CUDA kernels need a CUDA device, got {device}")
    if not torch.cuda.is_available():
        raise KernelsUnavailable("torch sees no CUDA device")
    index = torch.cuda.current_device() if device.index is None else device.index
    with _loading:
        if index not in _loaded:
            _loaded[index] = _load(torch.device("cuda", index))
        return _loaded[index]


def _load(device: torch.device) -> Kernels:
    target = architecture(torch.cuda.get_device_capability(device))
    driver = _driver()
    version = _check(driver, driver.cuDriverGetVersion())
    # The context that torch uses. Never released: that would unload the modules.
    context = _check(
        driver, driver.cuDevicePrimaryCtxRetain(_check(driver, driver.cuDeviceGet(device.index)))
    )
    directory = cache_directory()
    with ThreadPoolExecutor() as pool:  # compiling takes seconds per source and does not hold Python's lock
        codes = list(pool.map(lambda source: cubin(source, target, version, directory), read_sources()))
    with _current(driver, context):
        modules = [_check(driver, driver.cuModuleLoadData(code)) for code in codes]
    logger.info("CUDA kernels for %s loaded on %s", target, device)
    return Kernels(device, target, context, modules)


def _launcher(driver: Any, function: Any, device: torch.device, early: bool) -> Any:
    """early: the kernel may begin while the one before it runs (programmatic stream serialization)."""
    launch, success, config = driver.cuLaunchKernelEx, driver.CUresult.CUDA_SUCCESS, driver.CUlaunchConfig()
    if early:
        overlap = driver.CUlaunchAttribute()
        overlap.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        overlap.value.programmaticStreamSerializationAllowed = 1
        config.attrs, config.numAttrs = [overlap], 1

    def on_current_stream(grid: Size, block: Size, shared_bytes: int, parameters: int) -> str | None:
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.sharedMemBytes, config.hStream = shared_bytes, raw_stream(device)
        (status,) = launch(config, function, parameters, 0)
        return None if status == success else _describe(driver, status)

    return on_current_stream


def _parameters(driver: Any, function: Any) -> list[tuple[int, int]]:
    """Offset and size in bytes of each parameter."""
    found: list[tuple[int, int]] = []
    for index in itertools.count():
        status, offset, size = driver.cuFuncGetParamInfo(function, index)
        if status == driver.CUresult.CUDA_ERROR_INVALID_VALUE:  # past the last one
            return found
        _check(driver, (status,))
        found.append((offset, size))
    raise AssertionError("unreachable")


@contextmanager
def _current(driver: Any, context: Any) -> Iterator[None]:
    _check(driver, driver.cuCtxPushCurrent(context))
    try:
        yield
    finally:
        driver.cuCtxPopCurrent()


def _driver() -> Any:
    try:
        from cuda.bindings import driver

        _check(driver, driver.cuInit(0))
    except (ImportError, RuntimeError) as missing:
        raise KernelsUnavailable(
            f"no CUDA driver ({missing}): pip install 'driftguard-llm[cuda]'"
        ) from missing
    return driver


def _check(driver: Any, answer: tuple[Any, ...]) -> Any:
    """The result of a call, without its status. Raises KernelsUnavailable."""
    status, *values = answer
    if status != driver.CUresult.CUDA_SUCCESS:
        raise KernelsUnavailable(f"the CUDA driver answered {_describe(driver, status)}")
    return values[0] if len(values) == 1 else values


def _describe(driver: Any, status: Any) -> str:
    _, text = driver.cuGetErrorString(status)
    return f"{status.name}: {text.decode() if text else 'no description'}"
