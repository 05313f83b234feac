"""The engine: one step schedules, drafts, verifies and commits for every running request."""

from __future__ import annotations

from typing import Any

from driftguard_engine.config import EngineConfig
from driftguard_engine.core import DraftInfo, Request, RequestOutput


class Engine:
    """Continuous batching with exact speculative decoding.

    `step` belongs to one thread; everything else may be called from any thread.
    """

    def __init__(self, config: EngineConfig) -> None:
        """Loads the models. Raises InvalidModel, InvalidConfig."""
        self.config = config
        self.tokenizer: Any = None
        self.target_name: str = ""
        self.target_directory: str = ""
        self.max_length: int = config.max_length

    def submit(self, request: Request) -> None:
        """Queues a request. Raises InvalidRequest, EngineBusy."""
        raise NotImplementedError

    def abort(self, request_id: str) -> None:
        """Ends a request at the next step with finish_reason "abort"; an unknown id is ignored."""
        raise NotImplementedError

    def step(self) -> list[RequestOutput]:
        """Advances every running request by one verification; [] when idle. One thread only."""
        raise NotImplementedError

    def has_work(self) -> bool:
        raise NotImplementedError

    def wait_for_work(self, timeout_seconds: float) -> bool:
        """Blocks until there is work or the time is over; returns has_work()."""
        raise NotImplementedError

    def load_draft(self, directory: str, version: str | None = None) -> DraftInfo:
        """Loads a draft, not yet in service. Raises InvalidModel."""
        raise NotImplementedError

    def swap_draft(self, version: str) -> DraftInfo:
        """Puts a loaded draft into service for new requests. Raises UnknownDraft."""
        raise NotImplementedError

    def set_speculation(self, enabled: bool) -> None:
        raise NotImplementedError

    @property
    def speculation(self) -> bool:
        raise NotImplementedError

    @property
    def draft(self) -> DraftInfo:
        """The draft in service for new requests; method "none" while speculation is off."""
        raise NotImplementedError

    @property
    def drafts(self) -> list[DraftInfo]:
        raise NotImplementedError

    @property
    def running(self) -> int:
        raise NotImplementedError

    @property
    def waiting(self) -> int:
        raise NotImplementedError

    @property
    def backend(self) -> str:
        """The verify backend in use: reference or cuda."""
        raise NotImplementedError
