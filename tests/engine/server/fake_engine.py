"""An engine without a model, for the HTTP edge: fixed text; it pauses, fails or fills up on demand."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from driftguard_engine.adaptive_k.controller import DraftLengthController
from driftguard_engine.adaptive_k.plan import FixedK
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import (
    DraftInfo,
    EngineBusy,
    FinishedRequest,
    FinishReason,
    Request,
    RequestOutput,
    SpeculationCounts,
    VerificationRule,
)
from driftguard_engine.engine import Engine

TOKEN_TEXT = "é!"
K = 2


class FakeEngine(Engine):
    """Every step gives each request one token with the text TOKEN_TEXT, unless `paused`."""

    def __init__(self, tokenizer: Any, *, max_waiting: int = 1024) -> None:
        self.config = EngineConfig(
            target="fake", drafter="ngram", max_waiting=max_waiting, server_name="test"
        )
        self.tokenizer = tokenizer
        self.target_name = "fake-target"
        self.target_directory = "/models/fake-target"
        self.max_length = 64
        self.drafting = DraftLengthController(FixedK())
        self.paused = threading.Event()
        self.step_error: BaseException | None = None
        self.step_ends = threading.Event()  # else it hangs
        self.step_ends.set()
        self.lost: str | None = None
        self.activated, self.given_up = False, None
        self._started_at = time.monotonic()
        self.request_error: str | None = None
        self.fails_at: int | None = None  # a token; None: each request has the error
        self.stopped_loading = ""
        self.aborted: list[str] = []
        self.seen: list[Request] = []
        self._wake = threading.Condition()
        self._live: dict[str, tuple[Request, list[int], SpeculationCounts]] = {}
        self._to_abort: set[str] = set()

    def submit_all(self, requests: Sequence[Request]) -> None:
        with self._wake:
            if len(self._live) + len(requests) > self.config.max_waiting:
                raise EngineBusy(f"the queue is full ({self.config.max_waiting} requests wait)")
            self.seen.extend(requests)
            self._live |= {request.request_id: (request, [], SpeculationCounts()) for request in requests}
            self._wake.notify_all()

    def try_alone(self, request: Request) -> None:
        with self._wake:
            self._live[request.request_id] = request, [], SpeculationCounts()

    def abort(self, request_id: str) -> None:
        with self._wake:
            if request_id in self._live:
                self.aborted.append(request_id)
                self._to_abort.add(request_id)
                self._wake.notify_all()

    def stop_loading(self, *, failed: bool = False) -> None:
        self.stopped_loading = "failed" if failed else "stopped"

    def has_work(self) -> bool:
        with self._wake:
            return bool(self._to_abort) or (bool(self._live) and not self.paused.is_set())

    def wait_for_work(self, timeout_seconds: float) -> bool:
        with self._wake:
            self._wake.wait(min(timeout_seconds, 0.02))
        return self.has_work()

    def step(self) -> list[RequestOutput]:
        self.step_ends.wait()
        if self.step_error is not None:
            raise self.step_error
        with self._wake:
            outputs = [self._finish(request_id, "abort") for request_id in self._to_abort]
            self._to_abort.clear()
            if not self.paused.is_set():
                outputs += [self._advance(request_id) for request_id in list(self._live)]
        return outputs

    def _advance(self, request_id: str) -> RequestOutput:
        request, tokens, counts = self._live[request_id]
        if self.request_error is not None and self.fails_at in (None, request.prompt_token_ids[0]):
            return self._finish(request_id, "error")
        tokens.append(len(tokens))
        counts.add_step(drafted=K, accepted=len(tokens) % 2, emitted=1)
        if len(tokens) >= request.params.max_tokens:
            return self._finish(request_id, "length", TOKEN_TEXT)
        return RequestOutput(request_id, (tokens[-1],), TOKEN_TEXT)

    def _finish(self, request_id: str, reason: FinishReason, text: str = "") -> RequestOutput:
        request, tokens, counts = self._live.pop(request_id)
        finished = FinishedRequest(
            request=request,
            output_token_ids=tuple(tokens),
            text=TOKEN_TEXT * len(tokens),
            finish_reason=reason,
            counts=counts,
            draft=self.draft,
            num_speculative_tokens=K,
            started_at=request.arrived_at,
            ended_at=datetime.now(UTC),
            time_to_first_token_seconds=0.25 if tokens else None,
            time_per_output_token_seconds=0.125 if len(tokens) > 1 else None,
            concurrency=1,
            error=self.request_error,
        )
        return RequestOutput(request_id, tuple(tokens[-1:]) if text else (), text, finished)

    @property
    def speculation(self) -> bool:
        return True

    @property
    def draft(self) -> DraftInfo:
        return DraftInfo("fake-draft", "v1", "draft_model", "/models/fake-draft")

    @property
    def drafts(self) -> list[DraftInfo]:
        return [self.draft]

    @property
    def running(self) -> int:
        return len(self._live)

    @property
    def waiting(self) -> int:
        return 0

    @property
    def cached_tokens(self) -> int:
        return sum(len(tokens) for _, tokens, _ in list(self._live.values()))

    @property
    def backend(self) -> str:
        return "reference"

    @property
    def verification(self) -> VerificationRule:
        return self.config.verification

    @property
    def loop_fallback(self) -> str | None:
        return None

    @property
    def ahead(self) -> None:
        return None

    @property
    def backend_fallback(self) -> str | None:
        return None
