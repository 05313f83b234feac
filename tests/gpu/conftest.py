"""What tests on a GPU share. Nothing here needs the sidecar's packages."""

from __future__ import annotations

import pytest
import torch
from driftguard_engine.kernels.cuda import loader

from tests.gpu.begun import (  # noqa: F401 - pytest's hooks
    pytest_collection_modifyitems,
    pytest_runtest_setup,
    pytest_runtest_teardown,
    pytest_sessionfinish,
)

DRAWS = 30_000_000


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--draws", type=int, default=DRAWS, help="of the losslessness tests")


@pytest.fixture(scope="session")
def draws(pytestconfig: pytest.Config) -> int:
    chosen: int = pytestconfig.getoption("--draws", DRAWS)
    return chosen


@pytest.fixture(scope="session")
def engine_kernels() -> loader.Kernels:
    """The engine's own, on the current device."""
    return loader.kernels(torch.device("cuda"))
