"""TensorRT-LLM's `trtllm-serve`: `speculative_decoding` of each choice, in streams that of the last event.

By NVIDIA/TensorRT-LLM pull request 19311, which was open in autumn 2026; left out unless it is switched on.
"""

from __future__ import annotations

import msgspec

from driftguard.adapters.answers.counts import AnswerCounts, decoded, emitted, per_position
from driftguard.adapters.answers.openai import Usage


class _Statistics(msgspec.Struct, frozen=True):
    num_spec_steps: int
    total_draft_tokens: int
    total_accepted_draft_tokens: int
    num_spec_tokens: int | None = None
    acceptance_histogram: list[int] | None = None


class _Choice(msgspec.Struct, frozen=True):
    speculative_decoding: _Statistics | None = None


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice] = []
    usage: Usage | None = None


def counts_in(answer: bytes) -> AnswerCounts | None:
    """None where the answer has no speculative numbers. Raises AnswerUnreadable."""
    found = decoded(answer, _Answer)
    counts = found.choices[0].speculative_decoding if found.choices else None
    if counts is None:
        return None
    usage = found.usage or Usage()
    output = usage.completion_tokens
    return AnswerCounts(
        steps=counts.num_spec_steps,
        drafted=counts.total_draft_tokens,
        accepted=counts.total_accepted_draft_tokens,
        emitted=emitted(counts.num_spec_steps, counts.total_accepted_draft_tokens, output),
        num_speculative_tokens=counts.num_spec_tokens,
        accepted_per_position=per_position(counts.acceptance_histogram),
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        output_tokens=output,
    )
