"""What the routes work with, as a dependency of FastAPI."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from fastapi import Depends, Request

from driftguard_engine.engine import Engine
from driftguard_engine.server.metrics import Metrics
from driftguard_engine.server.prompt_limit import PromptLimit
from driftguard_engine.server.runner import EngineRunner


@dataclass(frozen=True, slots=True)
class Service:
    """started_at: Unix seconds. admin_key_hash: SHA-256 in hex of the key that /admin asks for, if any."""

    engine: Engine
    runner: EngineRunner
    metrics: Metrics
    started_at: int
    admin_key_hash: str | None
    limit: PromptLimit


def _service(request: Request) -> Service:
    service: Service = request.app.state.service
    return service


TheService = Annotated[Service, Depends(_service)]
