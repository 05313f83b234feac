"""Triton with the TensorRT-LLM backend: outputs that `sampling_param_return_perf_metrics` asks for.

The numbers are text. There is no count of steps, so K is needed: a draft proposes K tokens in each step,
except perhaps in the last.
"""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from driftguard.adapters.answers.counts import AnswerCounts, SettingNeeded, decoded

REQUEST_FIELD: Final = "sampling_param_return_perf_metrics"
OUTPUTS: Final = frozenset(
    {
        "acceptance_rate",
        "arrival_time_ns",
        "first_scheduled_time_ns",
        "first_token_time_ns",
        "kv_cache_alloc_new_blocks",
        "kv_cache_alloc_total_blocks",
        "kv_cache_hit_rate",
        "kv_cache_missed_block",
        "kv_cache_reused_block",
        "last_token_time_ns",
        "total_accepted_draft_tokens",
        "total_draft_tokens",
    }
)
_Number = int | Annotated[str, msgspec.Meta(pattern="^[0-9]+$", max_length=20)]


class _Answer(msgspec.Struct, frozen=True):
    total_draft_tokens: _Number | None = None
    total_accepted_draft_tokens: _Number | None = None
    arrival_time_ns: _Number | None = None
    first_token_time_ns: _Number | None = None


def counts_in(answer: bytes, num_speculative_tokens: int | None) -> AnswerCounts | None:
    """None where the answer has no speculative numbers. Raises AnswerUnreadable, SettingNeeded."""
    found = decoded(answer, _Answer)
    if found.total_draft_tokens is None or found.total_accepted_draft_tokens is None:
        return None
    drafted, accepted = int(found.total_draft_tokens), int(found.total_accepted_draft_tokens)
    if drafted and not num_speculative_tokens:
        raise SettingNeeded("Triton counts no steps: set num_speculative_tokens to the K of its engine")
    steps = -(-drafted // num_speculative_tokens) if num_speculative_tokens else 0
    return AnswerCounts(
        steps=steps,
        drafted=drafted,
        accepted=accepted,
        emitted=accepted + steps,
        time_to_first_token_seconds=_between(found.arrival_time_ns, found.first_token_time_ns),
    )


def _between(start_ns: int | str | None, end_ns: int | str | None) -> float | None:
    if start_ns is None or end_ns is None or int(end_ns) < int(start_ns):
        return None
    return (int(end_ns) - int(start_ns)) / 1e9
