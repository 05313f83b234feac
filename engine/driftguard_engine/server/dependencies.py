"""What the routes work with, as a dependency of FastAPI."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated, Final

from fastapi import Depends, Request

from driftguard_engine.engine import Engine
from driftguard_engine.server.metrics import Metrics
from driftguard_engine.server.prompt_limit import PromptLimit
from driftguard_engine.server.runner import EngineRunner

TOKENIZED_AT_ONCE: Final = 8  # requests; of the 40 threads for what would block the event loop


@dataclass(frozen=True, slots=True)
class Service:
    """started_at: Unix seconds. admin_key_hash: SHA-256 in hex of the key that /admin asks for, if any.
    tokenizing: held while a request's texts are tokenized, so that /admin finds a thread too. loading,
    swapping: held while a draft is loaded, or put into service, so that others find one."""

    engine: Engine
    runner: EngineRunner
    metrics: Metrics
    started_at: int
    admin_key_hash: str | None
    limit: PromptLimit
    tokenizing: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(TOKENIZED_AT_ONCE))
    loading: asyncio.Lock = field(default_factory=asyncio.Lock)
    swapping: asyncio.Lock = field(default_factory=asyncio.Lock)


async def _service(request: Request) -> Service:
    # Not a plain function, which would need a thread: /health must not wait for one.
    service: Service = request.app.state.service
    return service


TheService = Annotated[Service, Depends(_service)]
