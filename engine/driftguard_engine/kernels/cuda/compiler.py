"""csrc/*.cu to machine code by NVRTC: needs neither a GPU nor a CUDA toolkit, only the `cuda` extra.

Every .cu file is a program of its own; it may include the .cuh files beside it and nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

SOURCES = Path(__file__).parents[1] / "csrc"

LEAST_CAPABILITY = (8, 0)

OPTIONS = (
    "--std=c++20",
    # The arithmetic of the reference: no contraction, no flush to zero, division and root correctly rounded.
    "--fmad=false",
    "--ftz=false",
    "--prec-div=true",
    "--prec-sqrt=true",
    "--generate-line-info",  # for profilers and memory checkers; costs nothing at run time
    "--ptxas-options=-v",  # registers and spills of each kernel, in the log
)


class KernelsUnavailable(Exception):
    """{detail}: why no CUDA kernel can be used here, and what to do."""


class CompilationFailed(KernelsUnavailable):
    """{file} for {architecture}: {NVRTC's error and log}"""


@dataclass(frozen=True, slots=True)
class Source:
    """One program. headers: names and texts of every .cuh file beside it."""

    name: str
    text: str
    headers: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Compiled:
    cubin: bytes
    log: str  # warnings, and the resources that each kernel takes


def read_sources(directory: Path = SOURCES) -> list[Source]:
    """Every .cu file of the directory, by name. Raises KernelsUnavailable (there is none)."""
    headers = tuple((path.name, path.read_text()) for path in sorted(directory.glob("*.cuh")))
    sources = [Source(path.name, path.read_text(), headers) for path in sorted(directory.glob("*.cu"))]
    if not sources:
        raise KernelsUnavailable(f"no kernel sources (*.cu) in {directory}")
    return sources


def architecture(capability: tuple[int, int]) -> str:
    """The architecture to compile for, for a device of this compute capability.

    Hopper gets sm_90a: its own instructions (wgmma, setmaxnreg) exist only there, and a cubin need not run on
    another machine. Elsewhere the plain architecture has everything that the kernels use.
    Raises KernelsUnavailable (too old a device).
    """
    if capability < LEAST_CAPABILITY:
        least = ".".join(map(str, LEAST_CAPABILITY))
        found = ".".join(map(str, capability))
        raise KernelsUnavailable(
            f"the kernels need compute capability {least} or higher, this device has {found}"
        )
    major, minor = capability
    return f"sm_{major}{minor}a" if capability == (9, 0) else f"sm_{major}{minor}"


@cache
def nvrtc_version() -> str:
    """The version of the library; from pip also that of its package, which tells patch releases apart."""
    nvrtc = _nvrtc()
    major, minor = _check(nvrtc, nvrtc.nvrtcVersion())
    try:
        return f"{major}.{minor} {metadata.version('nvidia-cuda-nvrtc')}"
    except metadata.PackageNotFoundError:
        return f"{major}.{minor}"


def compile_source(source: Source, architecture: str, options: Sequence[str] = OPTIONS) -> Compiled:
    """Raises CompilationFailed, KernelsUnavailable (no NVRTC, or one that is too old for the device)."""
    nvrtc = _nvrtc()
    known = _check(nvrtc, nvrtc.nvrtcGetSupportedArchs())
    if int(architecture.removeprefix("sm_").rstrip("af")) not in known:
        newest = f"sm_{max(known)}"
        raise KernelsUnavailable(
            f"NVRTC {nvrtc_version()} cannot compile for {architecture}, at most for {newest}:"
            " install a newer nvidia-cuda-nvrtc"
        )
    names = [name.encode() for name, _ in source.headers]
    texts = [text.encode() for _, text in source.headers]
    program = _check(
        nvrtc,
        nvrtc.nvrtcCreateProgram(source.text.encode(), source.name.encode(), len(names), texts, names),
    )
    try:
        given = [option.encode() for option in (f"--gpu-architecture={architecture}", *options)]
        (result,) = nvrtc.nvrtcCompileProgram(program, len(given), given)
        log = _text(nvrtc, program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog)
        if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompilationFailed(f"{source.name} for {architecture}: {result.name}\n{_decode(log)}")
        return Compiled(_text(nvrtc, program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), _decode(log))
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc() -> Any:
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # the first call loads the library
    except (ImportError, RuntimeError) as missing:
        raise KernelsUnavailable(f"no NVRTC ({missing}): pip install 'driftguard-llm[cuda]'") from missing
    return nvrtc


def _check(nvrtc: Any, answer: tuple[Any, ...]) -> Any:
    """The result of a call, without its status."""
    status, *values = answer
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelsUnavailable(f"NVRTC answered {status.name}")
    return values[0] if len(values) == 1 else values


def _text(nvrtc: Any, program: Any, size_of: Any, read: Any) -> bytes:
    held = bytes(_check(nvrtc, size_of(program)))
    _check(nvrtc, read(program, held))
    return held


def _decode(log: bytes) -> str:
    return log.rstrip(b"\0").decode(errors="replace").strip()
