"""vLLM, also inside BentoML and OpenLLM, and the built-in engine: `metrics.speculative_decoding`.

vLLM >= 0.29 started with `--per-request-spec-decode-metrics summary`; the object is null where n > 1, and
where the request ended on a stop string, which is then the `stop_reason` of its choice, unless the model
ended in the same step by itself. A streamed answer has it in its last event, and only with
`stream_options.include_usage`.
"""

from __future__ import annotations

import msgspec

from driftguard.adapters.answers.counts import AnswerCounts, decoded, emitted, per_position, seconds
from driftguard.adapters.answers.openai import Usage


class _Speculation(msgspec.Struct, frozen=True):
    num_spec_steps: int
    num_draft_tokens: int
    num_accepted_draft_tokens: int
    num_spec_tokens: int | None = None
    acceptance_histogram: list[int] | None = None


class _Metrics(msgspec.Struct, frozen=True):
    speculative_decoding: _Speculation | None = None
    time_to_first_token_ms: float | None = None
    mean_itl_ms: float | None = None


class _Choice(msgspec.Struct, frozen=True):
    stop_reason: str | int | None = None  # a stop string, or the id of a stop token


class _Stopped(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []


class _Answer(msgspec.Struct, frozen=True):
    usage: Usage | None = None
    metrics: _Metrics | None = None


def counts_in(answer: bytes) -> AnswerCounts | None:
    """None where the answer has no speculative numbers. Raises AnswerUnreadable."""
    found = decoded(answer, _Answer)
    if found.metrics is None or found.metrics.speculative_decoding is None:
        return None
    counts, usage = found.metrics.speculative_decoding, found.usage or Usage()
    output = usage.completion_tokens
    return AnswerCounts(
        steps=counts.num_spec_steps,
        drafted=counts.num_draft_tokens,
        accepted=counts.num_accepted_draft_tokens,
        emitted=emitted(counts.num_spec_steps, counts.num_accepted_draft_tokens, output),
        num_speculative_tokens=counts.num_spec_tokens,
        accepted_per_position=per_position(counts.acceptance_histogram),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=output,
        time_to_first_token_seconds=seconds(found.metrics.time_to_first_token_ms),
        time_per_output_token_seconds=seconds(found.metrics.mean_itl_ms),
    )


def ended_on_stop_string(answer: bytes) -> bool:
    """Raises AnswerUnreadable."""
    return any(isinstance(choice.stop_reason, str) for choice in decoded(answer, _Stopped).choices)
