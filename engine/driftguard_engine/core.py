"""What goes into the engine and comes out of it: requests, counts, outputs, errors. No tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]
VerificationRule = Literal["token", "block", "tree"]
MAX_STOP_STRINGS = 16  # of one request


class EngineError(Exception):
    """{detail}: base of the engine's errors; `status` is the HTTP status of the answer."""

    status = 500
    code = "internal_error"

    def __init__(self, detail: str, *, field: str | None = None) -> None:
        super().__init__(detail)
        self.detail = detail
        self.field = field


class InvalidRequest(EngineError):
    """A field of the request is wrong; names the field, the value given and what is allowed."""

    status = 400
    code = "invalid_request"


class EngineBusy(EngineError):
    """The waiting queue is full."""

    status = 429
    code = "queue_full"


class EngineUnavailable(EngineError):
    """The engine has failed, or is shutting down."""

    status = 503
    code = "engine_unavailable"


class InvalidModel(EngineError):
    """A model directory is missing, unsafe (pickled weights), too large, or of another tokenizer."""

    status = 422
    code = "invalid_model"


class UnknownDraft(EngineError):
    """No draft of this version is loaded."""

    status = 404
    code = "unknown_draft"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one request samples.

    temperature: 0 is greedy. top_k: 0 is off. top_p: 1.0 is off. seed: 0 .. 2**63 - 1.
    num_speculative_tokens: draft K of this request; None is the engine's default, 0 switches speculation off.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    stop: tuple[str, ...] = ()
    num_speculative_tokens: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """One sequence to generate. `request_id` is unique among the requests in the engine."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrived_at: datetime
    segment: str = "default"
    session: str | None = None


@dataclass(slots=True)
class SpeculationCounts:
    """Counts of one request; per-position counts are marginal, see the glossary of docs/architecture.md."""

    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    drafted_per_position: list[int] = field(default_factory=list)
    accepted_per_position: list[int] = field(default_factory=list)
    acceptance_histogram: list[int] = field(default_factory=list)  # [k] = steps that accepted exactly k

    def add_step(self, drafted: int, accepted: int, emitted: int) -> None:
        """One verification. Invariant: accepted <= drafted, emitted <= accepted + 1."""
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        self.emitted += emitted
        for counts, length in (
            (self.drafted_per_position, drafted),
            (self.accepted_per_position, drafted),
            (self.acceptance_histogram, drafted + 1),
        ):
            counts.extend([0] * (length - len(counts)))
        for position in range(drafted):
            self.drafted_per_position[position] += 1
        for position in range(accepted):
            self.accepted_per_position[position] += 1
        self.acceptance_histogram[accepted] += 1


@dataclass(frozen=True, slots=True)
class DraftInfo:
    """Which draft serves. `method` is the name of its drafter; `version` names the draft in records;
    `directory` is None where there are no files, as for n-gram lookup; `corpus` is that of a hybrid, beside
    its model."""

    name: str
    version: str
    method: str
    directory: str | None = None
    corpus: str | None = None


@dataclass(frozen=True, slots=True)
class FinishedRequest:
    """Everything that is known about a request when it leaves the engine. Times are UTC and seconds."""

    request: Request
    output_token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    counts: SpeculationCounts
    draft: DraftInfo
    num_speculative_tokens: int
    started_at: datetime
    ended_at: datetime
    time_to_first_token_seconds: float | None
    time_per_output_token_seconds: float | None
    concurrency: int
    error: str | None = None
    reused_prompt_tokens: int = 0
    adaptive_k: bool = False  # then num_speculative_tokens is the most that a step drafted
    verification: VerificationRule = "token"  # by which a request that samples was verified


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What one step added to one request: new token ids, new text, and the end if it ended.

    has_draft: a draft may propose tokens for the request.
    """

    request_id: str
    token_ids: tuple[int, ...]
    text: str
    finished: FinishedRequest | None = None
    has_draft: bool = False
