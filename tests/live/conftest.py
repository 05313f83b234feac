from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.live.servers import (
    DRAFT,
    TARGET,
    Engine,
    gguf,
    llama_server,
    running,
    speculative_config,
    vllm_server,
)


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The bundled target and draft in GGUF."""
    directory = tmp_path_factory.mktemp("gguf")
    return gguf(TARGET, directory), gguf(DRAFT, directory)


@pytest.fixture(scope="module")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """One for all tests of a file: it takes a minute to start."""
    with running(vllm_server(tmp_path_factory.mktemp("vllm"), speculative_config(DRAFT))) as engine:
        yield engine


@pytest.fixture
def llama(converted: tuple[Path, Path], tmp_path: Path) -> Iterator[Engine]:
    with running(llama_server(*converted, tmp_path)) as engine:
        yield engine
