"""Finished requests for telemetry tests."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from driftguard_engine.core import (
    DraftInfo,
    FinishedRequest,
    FinishReason,
    Request,
    SamplingParams,
    SpeculationCounts,
)

STARTED = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
DRAFT = DraftInfo("small", "abc123", "draft_model", "/models/small")


def finished_request(
    number: int,
    *,
    temperature: float = 1.0,
    draft: DraftInfo = DRAFT,
    num_speculative_tokens: int = 3,
    finish_reason: FinishReason = "stop",
) -> FinishedRequest:
    """Request `request-<number>` of segment `segment-<number>`: 2 steps, 5 drafted, 3 accepted, 5 emitted."""
    counts = SpeculationCounts()
    counts.add_step(drafted=3, accepted=1, emitted=2)
    counts.add_step(drafted=2, accepted=2, emitted=3)
    params = SamplingParams(max_tokens=8, temperature=temperature)
    return FinishedRequest(
        request=Request(
            f"request-{number}", (7, 8, 9), params, STARTED, segment=f"segment-{number}", session="session"
        ),
        output_token_ids=(1, 2, 3, 4, 5),
        text="abcde",
        finish_reason=finish_reason,
        counts=counts,
        draft=draft,
        num_speculative_tokens=num_speculative_tokens,
        started_at=STARTED,
        ended_at=STARTED + timedelta(seconds=2),
        time_to_first_token_seconds=0.5,
        time_per_output_token_seconds=0.25,
        concurrency=4,
    )
