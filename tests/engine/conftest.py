"""CUDA kernels on the CPU, for every test of the engine that asks for `compiled`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine.simt.emulator import Module, compile_kernels, has_compiler


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Module]:
    """compiled(path, ...): the kernels of these files as one program, compiled once for all workers."""
    if not has_compiler():
        pytest.skip("the kernels' emulator needs g++")
    root = tmp_path_factory.getbasetemp()
    directory = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / "simt"
    directory.mkdir(exist_ok=True)
    modules: dict[tuple[Path, ...], Module] = {}

    def compile_once(*paths: Path) -> Module:
        if paths not in modules:
            modules[paths] = compile_kernels(paths, directory)
        return modules[paths]

    return compile_once
