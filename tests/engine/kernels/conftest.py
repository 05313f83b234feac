"""All kernels of the engine as one program, for every test that asks for `module`, and as machine code."""

from __future__ import annotations

import fcntl
import pickle
from collections.abc import Callable

import pytest
from driftguard_engine.kernels.cuda.compiler import Compiled, Source, compile_source

from tests.engine.conftest import of_all_workers
from tests.engine.kernels.emulated import SOURCES
from tests.engine.simt.emulator import Module


@pytest.fixture(scope="session")
def module(compiled: Callable[..., Module]) -> Module:
    return compiled(*SOURCES)


@pytest.fixture(scope="session")
def compiled_for(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Source, str], Compiled]:
    """compiled_for(source, architecture): what `compile_source` gives, compiled once for all workers."""
    directory = of_all_workers(tmp_path_factory, "cubins")

    def compile_once(source: Source, architecture: str) -> Compiled:
        kept = directory / f"{architecture} {source.name}"
        with kept.with_name(f"{kept.name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # another process may be compiling the same
            if not kept.exists():
                kept.write_bytes(pickle.dumps(compile_source(source, architecture)))
            found: Compiled = pickle.loads(kept.read_bytes())
        return found

    return compile_once
