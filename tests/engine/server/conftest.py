from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import pytest
from driftguard_engine.config import EngineConfig
from driftguard_engine.engine import Engine

from tests.engine.core.eagle3_heads import load_target, save_random_head
from tests.engine.core.heads import save_random
from tests.engine.core.medusa_heads import save_random_heads
from tests.engine.core.streaming_adapters import save_random_adapter
from tests.engine.server.fake_engine import FakeEngine
from tests.engine.server.serving import served
from tests.engine.server.tiny_models import CHAT_TEMPLATE, byte_tokenizer, save_model


@pytest.fixture
def fake() -> FakeEngine:
    return FakeEngine(byte_tokenizer())


@pytest.fixture
def client(fake: FakeEngine) -> Iterator[httpx.Client]:
    with served(fake) as client:
        yield client


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directories: target; good (accepted always); poor; chat (the target with a chat template);
    head (a random EAGLE-3 head); dspark (another kind of head); heads (random Medusa heads);
    adapter (a random streaming adapter)."""
    root = tmp_path_factory.mktemp("models")
    save_model(root / "target", seed=1)
    save_model(root / "good", seed=1)
    save_model(root / "poor", seed=2)
    save_model(root / "chat", seed=1, tokenizer=byte_tokenizer(CHAT_TEMPLATE))
    target = load_target(root / "target")
    save_random_head(root / "head", target, range(257), (0,))
    save_random(root / "dspark", "dspark", target, features=(0,))
    save_random_heads(root / "heads", target.config.hidden_size, 257)
    save_random_adapter(root / "adapter", root / "target", layers=1)
    return root


@pytest.fixture
def real_engine(models: Path) -> Engine:
    return Engine(EngineConfig(target=str(models / "target"), draft=str(models / "poor"), threads=1))


@pytest.fixture
def real_client(real_engine: Engine) -> Iterator[httpx.Client]:
    with served(real_engine) as client:
        yield client


def openai_client(client: httpx.Client) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{client.base_url}/v1", api_key="unused", max_retries=0)
