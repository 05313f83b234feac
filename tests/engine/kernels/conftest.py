"""All kernels of the engine as one program, for every test here that asks for `module`."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.engine.kernels.emulated import SOURCES
from tests.engine.simt.emulator import Module


@pytest.fixture(scope="session")
def module(compiled: Callable[..., Module]) -> Module:
    return compiled(*SOURCES)
