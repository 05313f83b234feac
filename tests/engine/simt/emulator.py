"""CUDA kernels run on the CPU, bit for bit, by the system's g++: for tests on machines without a GPU.

    module = compile_kernels([path], directory)
    module.launch("add", grid=(4,), block=(256,), args=[x, y, np.int32(1000)], seed=1)

A kernel file is plain CUDA C++ without includes; `DRIFTGUARD_SIMT` is defined, for alternatives to inline
PTX. Kernels are `extern "C" __global__ void` functions; dynamic shared memory is declared inside a function,
as `extern __shared__ T name[];`. Not emulated: weak memory ordering, blocks that run at the same time (one
that waits for another one fails), inline PTX, approximate functions such as `__expf`.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import re
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.engine.simt.arguments import Parameters, pack
from tests.engine.simt.memory import End, Guarded

HERE = Path(__file__).parent
EXAMPLES = HERE / "kernels" / "examples.cu"

_OPTIONS = (
    *("-O1", "-g1", "-std=c++20", "-fPIC", "-shared", "-w", "-fno-strict-aliasing"),
    *("-ffp-contract=off", "-fno-fast-math"),
    # Calls that switch to another thread change every variable, also those that no pointer leads to.
    *("-fno-ipa-reference", "-fno-ipa-pure-const", "-fno-ipa-modref"),
    # Stacks: fortified jumps refuse to leave one for another; large frames touch the guard page.
    *("-U_FORTIFY_SOURCE", "-fstack-clash-protection"),
    # Undefined behaviour ends the launch; variables without a value get an unlikely one.
    "-fsanitize=bounds,alignment,shift,signed-integer-overflow,integer-divide-by-zero,float-cast-overflow",
    *("-fsanitize-undefined-trap-on-error", "-ftrivial-auto-var-init=pattern"),
)

_BOUNDS = r"(?:__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\)\s*)?"
_KERNEL = re.compile(rf"__global__\s+{_BOUNDS}void\s+{_BOUNDS}(\w+)\s*\(")
_ALIGNED = r"(?:(?:__align__|alignas)\s*\([^)]*\)\s*)?"
_DYNAMIC = re.compile(rf"\bextern\s+__shared__\s+{_ALIGNED}([^;\[\]]+?)\s*\b(\w+)\s*\[\s*\]\s*;")


class KernelFault(Exception):
    """{kernel}, block, thread: what it did that would hang a GPU, is undefined, or damages other memory."""


class CompilationFailed(Exception):
    """{files}: {errors of g++}"""


class _Report(ctypes.Structure):
    _fields_ = (
        ("message", ctypes.c_char * 2048),
        ("where", ctypes.c_char * 160),
        ("place", ctypes.c_char * 160),
        ("signal", ctypes.c_int),
        ("address", ctypes.c_uint64),
        ("instruction", ctypes.c_uint64),
    )


def has_compiler() -> bool:
    return shutil.which("g++") is not None


def compile_kernels(paths: Sequence[Path], directory: Path) -> Module:
    """One program of all files, in this order; compiled once for each content of the directory's cache.

    Raises CompilationFailed.
    """
    source = _translation_unit(paths)
    headers = b"".join((HERE / name).read_bytes() for name in ("runtime.hpp", "cuda.hpp"))
    key = hashlib.sha256(headers + " ".join(_OPTIONS).encode() + source.encode()).hexdigest()[:24]
    library = directory / f"{key}.so"
    with (directory / f"{key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be compiling the same
        if not library.exists():
            with tempfile.NamedTemporaryFile(dir=directory, suffix=".so", delete=False) as file:
                _compile([*_OPTIONS, f"-I{HERE}", "-x", "c++", "-", "-o", file.name], source, paths)
            Path(file.name).replace(library)
    return Module(library)


def _translation_unit(paths: Sequence[Path]) -> str:
    # Preprocessed first, because macros may make kernels. The kernels' names cannot be had from C++ itself.
    includes = "".join(f'#include "{path.absolute()}"\n' for path in paths)
    expanded = _compile(["-E", "-std=c++20", "-DDRIFTGUARD_SIMT", "-w", "-x", "c++", "-"], includes, paths)
    names = list(dict.fromkeys(_KERNEL.findall(expanded)))
    if not names:
        raise CompilationFailed(f"{', '.join(path.name for path in paths)}: no __global__ function in it")
    body = _DYNAMIC.sub(r"\1* const \2 = reinterpret_cast<\1*>(simt::dynamic_shared());", expanded)
    table = ", ".join(f'simt::Call<{name}>::described("{name}")' for name in names)
    return f"""#include "runtime.hpp"
namespace {{
#include "cuda.hpp"
{body}
const simt::Kernel kernels[] = {{{table}}};
}}
extern "C" unsigned simt_kernel_count() {{ return {len(names)}; }}
extern "C" const char* simt_name(unsigned i) {{ return kernels[i].name; }}
extern "C" const char* simt_parameters(unsigned i) {{ return kernels[i].parameters; }}
extern "C" const unsigned* simt_sizes(unsigned i) {{ return kernels[i].sizes; }}
extern "C" int simt_launch(unsigned i, const unsigned* grid, const unsigned* block, void** values,
                           uint64_t shared_bytes, uint64_t seed, double limit, simt::Report* report) {{
  return simt::launch(kernels[i], grid, block, values, shared_bytes, seed, limit, report);
}}
"""


def _compile(options: Sequence[str], source: str, paths: Sequence[Path]) -> str:
    done = subprocess.run(["g++", *options], input=source, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CompilationFailed(f"{', '.join(str(path) for path in paths)}:\n{done.stderr[:8000]}")
    return done.stdout


class Module:
    """Kernels that were compiled together. `__device__` variables keep their values between launches."""

    def __init__(self, library: Path) -> None:
        self.library = library
        self._code = code = ctypes.CDLL(str(library))
        code.simt_name.restype = code.simt_parameters.restype = ctypes.c_char_p
        code.simt_sizes.restype = ctypes.POINTER(ctypes.c_uint)
        self._kernels: dict[str, tuple[int, Parameters]] = {}
        for i in range(code.simt_kernel_count()):
            letters = code.simt_parameters(i).decode()
            parameters = Parameters(letters, tuple(code.simt_sizes(i)[: len(letters)]))
            self._kernels[code.simt_name(i).decode()] = (i, parameters)

    @property
    def names(self) -> list[str]:
        return list(self._kernels)

    def launch(
        self,
        name: str,
        *,
        grid: Sequence[int],
        block: Sequence[int],
        args: Sequence[Any],
        shared_bytes: int = 0,
        seed: int = 0,
        end: End | None = None,
        alignment: int = 16,
        limit_seconds: float = 60.0,
    ) -> None:
        """Run the kernel once; arrays among args are changed in place.

        args: one for each parameter. A contiguous array (or None) for a pointer; an array given twice is one
        buffer. A numpy scalar of exactly the parameter's type for a number. A `Guarded`'s bytes for structs:
        a ctypes.Structure or numpy.void of the struct's size.
        seed: of the order in which blocks and threads run, and of what shared memory holds at first.
        end: which end of each array has an inaccessible page right after it; by default the end for even
        seeds and the start for odd ones. alignment: of arrays, in bytes.
        Raises KernelFault, TypeError (argument does not fit), KeyError (no such kernel).
        """
        end = end or ("start" if seed % 2 else "end")
        arguments = pack(name, self._kernels[name][1], args, end, alignment)
        self.launch_packed(
            name, grid, block, arguments.pointers(), shared_bytes, seed, limit_seconds, arguments.buffers
        )
        harmed = arguments.copy_back()
        if harmed is not None:
            raise KernelFault(f"{name}, seed {seed}: writes beside the array of argument {harmed}")

    def launch_packed(
        self,
        name: str,
        grid: Sequence[int],
        block: Sequence[int],
        pointers: Any,
        shared_bytes: int = 0,
        seed: int = 0,
        limit_seconds: float = 60.0,
        buffers: Mapping[int, Guarded] | None = None,
    ) -> None:
        """As cuLaunchKernel: `pointers` is a ctypes array with the address of each argument's value.

        buffers: what arguments point to, by position, for messages. Raises KernelFault.
        """
        report = _Report()
        failed = self._code.simt_launch(
            self._kernels[name][0],
            _three(grid),
            _three(block),
            pointers,
            ctypes.c_uint64(shared_bytes),
            ctypes.c_uint64(seed),
            ctypes.c_double(limit_seconds),
            ctypes.byref(report),
        )
        if failed:
            problem = self._problem(report, buffers or {})
            raise KernelFault(f"{name}, {report.where.decode()}, seed {seed}: {problem}")

    def _problem(self, report: _Report, buffers: Mapping[int, Guarded]) -> str:
        if report.message or not report.signal:
            return str(report.message.decode())
        line = self._line(report.instruction)
        kind = _SIGNALS.get(report.signal)
        if kind:
            return f"{kind} at {line}"
        for position, buffer in buffers.items():
            place = buffer.place(report.address)
            if place:
                return f"accesses argument {position} {place}, at {line}"
        place = report.place.decode() or f"{report.address:#x}, which belongs to no argument"
        return f"accesses memory {place}, at {line}"

    def _line(self, instruction: int) -> str:
        """The innermost line of a kernel file that the instruction belongs to."""
        if not shutil.which("addr2line"):
            return f"instruction {instruction:#x} of {self.library} (addr2line names the line)"
        command = ["addr2line", "-i", "-e", str(self.library), f"{instruction:#x}"]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        ours = [
            line for line in lines if not line.startswith((str(HERE / "cuda.hpp"), str(HERE / "runtime.hpp")))
        ]
        return (ours or lines)[0].split(" (")[0]


_UNDEFINED = (
    "undefined: an index outside of an array of known size, a misaligned access, an overflow, a shift by too"
    " many bits or a conversion out of range"
)
_SIGNALS = {
    signal.SIGILL: _UNDEFINED,
    signal.SIGTRAP: _UNDEFINED,
    signal.SIGFPE: "integer division by zero",
    signal.SIGVTALRM: "still running after the limit of processor time",
}


def _three(size: Sequence[int]) -> Any:
    return (ctypes.c_uint * 3)(*size, *[1] * (3 - len(size)))
