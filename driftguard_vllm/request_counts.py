"""What the scheduler did for one request, and the record of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final

from driftguard.records import (
    DEFAULT_SEGMENT,
    AcceptanceRecord,
    check_record,
    new_record_id,
)
from driftguard_vllm import labels
from driftguard_vllm.settings import PluginSettings

NONE: Final = "none"


@dataclass(frozen=True, slots=True)
class Speculation:
    """How an engine speculates. `rule`, `verification`: of requests that are sampled; those at temperature 0
    are greedy."""

    target: str
    draft: str
    draft_version: str
    method: str
    k: int
    rule: str
    verification: str

    @classmethod
    def of(cls, config: Any, settings: PluginSettings) -> Speculation:
        """From vLLM's VllmConfig."""
        served = config.model_config.served_model_name
        target = settings.target or (served[0] if isinstance(served, list) else served)
        how = config.speculative_config
        if how is None:
            return cls(target, NONE, NONE, NONE, 0, "unknown", "unknown")
        model = str(getattr(how, "model", None) or how.method)
        method = getattr(how, "rejection_sample_method", "standard")  # or one that is not lossless
        verification = {"standard": "token", "block": "block"}.get(method, "unknown")
        return cls(
            target=target,
            draft=settings.draft or model.rstrip("/").rpartition("/")[2],
            draft_version=settings.draft_version,
            method=str(how.method),
            k=int(how.num_speculative_tokens),
            rule="unknown" if verification == "unknown" else "rejection",
            verification=verification,
        )


@dataclass(slots=True)
class RequestCounts:
    """As `vllm:spec_decode_*` count: a step without a draft is none, and draft tokens that a grammar forbids
    are not counted. `loaded_version`: of the draft when the request began, where it was loaded since vLLM's
    start; one that is loaded meanwhile does not prove itself by the request."""

    loaded_version: str | None = None
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: list[int] = field(default_factory=list)
    first_token_at: float | None = None  # seconds since 1970
    cached_tokens: int | None = None

    def add_step(self, drafted: int, accepted: int) -> None:
        self.steps += 1
        self.drafted += drafted
        self.accepted += accepted
        places = self.accepted_per_position
        if len(places) < drafted or len(places) < accepted:
            places.extend([0] * (max(drafted, accepted) - len(places)))
        for place in range(accepted):
            places[place] += 1

    def record(
        self, request: Any, how: Speculation, server: str, ended_at: float, running: int, waiting: int
    ) -> AcceptanceRecord:
        """`request`: vLLM's Request, that has ended, with `running` others and itself. Raises RecordError."""
        output, temperature = int(request.num_output_tokens), request.sampling_params.temperature
        named = labels.of(request.sampling_params)
        started_at = min(float(request.arrival_time), ended_at)
        first = self.first_token_at
        record = AcceptanceRecord(
            record_id=new_record_id(),
            kind="request",
            started_at=datetime.fromtimestamp(started_at, UTC),
            ended_at=datetime.fromtimestamp(ended_at, UTC),
            server=server,
            target=how.target,
            draft=how.draft,
            draft_version=self.loaded_version or how.draft_version,
            method=how.method,
            segment=named.get("segment", DEFAULT_SEGMENT),
            session=named.get("session"),
            steps=self.steps,
            drafted=self.drafted,
            accepted=self.accepted,
            emitted=min(self.accepted + self.steps, max(output - 1, 0)),
            accepted_per_position=self.accepted_per_position if self.steps else None,
            num_speculative_tokens=how.k,
            acceptance_rule="greedy" if temperature == 0.0 else how.rule,  # type: ignore[arg-type]
            verification="greedy" if temperature == 0.0 else how.verification,  # type: ignore[arg-type]
            temperature=temperature,
            prompt_tokens=request.num_prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=output,
            time_to_first_token_seconds=None if first is None else max(first - started_at, 0.0),
            time_per_output_token_seconds=(
                None if first is None or output < 2 else max(ended_at - first, 0.0) / (output - 1)
            ),
            concurrency=running,
            waiting_requests=waiting,
            fidelity="request",
        )
        check_record(record)
        return record
