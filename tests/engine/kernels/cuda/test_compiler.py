"""Every kernel compiles for every architecture that the engine names, without a GPU."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from driftguard_engine.kernels.cuda import compiler
from driftguard_engine.kernels.cuda.compiler import (
    SOURCES,
    CompilationFailed,
    Compiled,
    KernelsUnavailable,
    Source,
    compile_source,
    read_sources,
)

from tests.gpu.check.resources import resources

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent / "sources"
ARCHITECTURES = ("sm_80", "sm_90a", "sm_100")
KERNEL_FILES = sorted(SOURCES.glob("*.cu"))


def source(path: Path) -> Source:
    return next(source for source in read_sources(path.parent) if source.name == path.name)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("path", [*KERNEL_FILES, HERE / "blend.cu"], ids=lambda path: path.name)
def test_compiles_into_registers_without_a_warning(
    compiled_for: Callable[[Source, str], Compiled], path: Path, architecture: str
) -> None:
    compiled = compiled_for(source(path), architecture)
    assert compiled.cubin.startswith(b"\x7fELF")
    assert "warning" not in compiled.log
    found = resources(compiled.log)
    assert found
    assert not [kernel for kernel in found if kernel.uses_local_memory]


def test_a_kernel_that_leaves_its_registers_is_noticed() -> None:
    (found,) = resources(compile_source(source(HERE / "spilling.cu"), "sm_90a").log)
    assert found.kernel == "spilling"
    assert found.stack_bytes == 256
    assert found.registers > 0
    assert found.uses_local_memory


def test_errors_name_the_file_the_line_and_the_architecture() -> None:
    broken = Source("broken.cu", '#include "lines.cuh"\n', (("lines.cuh", "\n\nint x = nowhere;\n"),))
    with pytest.raises(CompilationFailed, match=r"broken\.cu for sm_80.*\n(.*\n)*lines\.cuh\(3\).*nowhere"):
        compile_source(broken, "sm_80")
    absent = Source("broken.cu", "#include <cstdint>\n", ())
    with pytest.raises(CompilationFailed, match=r"broken\.cu\(1\).*cstdint"):
        compile_source(absent, "sm_80")


def test_devices() -> None:
    assert [compiler.architecture(c) for c in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 1))] == [
        "sm_80",
        "sm_89",
        "sm_90a",
        "sm_100",
        "sm_121",
    ]
    with pytest.raises(KernelsUnavailable, match=r"8\.0 or higher, this device has 7\.5"):
        compiler.architecture((7, 5))
    with pytest.raises(KernelsUnavailable, match=r"NVRTC 13\.\d.* cannot compile for sm_990"):
        compile_source(source(HERE / "blend.cu"), "sm_990")


def test_a_directory_without_kernels(tmp_path: Path) -> None:
    with pytest.raises(KernelsUnavailable, match=str(tmp_path)):
        read_sources(tmp_path)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no CUDA toolkit")
def test_compiles_under_nvcc(tmp_path: Path) -> None:
    """All files in one program, for the host and for the device, neither optimised nor assembled: NVRTC does
    the rest above."""
    program = tmp_path / "all.cu"
    files = [*KERNEL_FILES, HERE / "blend.cu"]
    program.write_text("".join(f'#include "{path}"\n' for path in files))
    target = ["-G", "-gencode", "arch=compute_80,code=compute_80", "-std=c++20", "-Werror", "all-warnings"]
    done = subprocess.run(
        ["nvcc", "-c", *target, str(program), "-o", str(tmp_path / "all.o")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
