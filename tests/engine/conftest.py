"""Torch on one thread, and CUDA kernels on the CPU for every test that asks for `compiled`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.simt.emulator import Module, compile_kernels, has_compiler


def of_all_workers(tmp_path_factory: pytest.TempPathFactory, name: str) -> Path:
    """A directory that the workers of this test run share."""
    root = tmp_path_factory.getbasetemp()
    directory = (root.parent if "PYTEST_XDIST_WORKER" in os.environ else root) / name
    directory.mkdir(exist_ok=True)
    return directory


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Module]:
    """compiled(path, ...): the kernels of these files as one program, compiled once for all workers."""
    if not has_compiler():
        pytest.skip("the kernels' emulator needs g++")
    directory = of_all_workers(tmp_path_factory, "simt")
    modules: dict[tuple[Path, ...], Module] = {}

    def compile_once(*paths: Path) -> Module:
        if paths not in modules:
            modules[paths] = compile_kernels(paths, directory)
        return modules[paths]

    return compile_once
