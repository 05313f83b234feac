"""llama.cpp's server: `timings`, in every answer and in the last event of a streamed one.

`draft_n` is left out if nothing was drafted, which is also the case if the server does not speculate. The
first token comes from reading the prompt; each later forward pass emits one token and the accepted ones.
"""

from __future__ import annotations

import msgspec

from driftguard.adapters.answers.counts import AnswerCounts, decoded, seconds
from driftguard.adapters.answers.openai import Usage


class _Timings(msgspec.Struct, frozen=True):
    predicted_n: int
    predicted_per_token_ms: float | None = None
    draft_n: int = 0
    draft_n_accepted: int = 0
    cache_n: int | None = None  # prompt tokens reused from the cache


class _Answer(msgspec.Struct, frozen=True):
    usage: Usage | None = None
    timings: _Timings | None = None
    tokens_evaluated: int | None = None  # prompt tokens of /completion, those from the cache included


def counts_in(answer: bytes) -> AnswerCounts | None:
    """None if the answer has no timings. Raises AnswerUnreadable."""
    found = decoded(answer, _Answer)
    timings, usage = found.timings, found.usage or Usage()
    if timings is None:
        return None
    accepted, later = timings.draft_n_accepted, max(timings.predicted_n - 1, 0)
    # An answer that ends inside an accepted run has fewer tokens than were accepted and sampled.
    steps = max(later - accepted, 1 if timings.draft_n else 0)
    return AnswerCounts(
        steps=steps,
        drafted=timings.draft_n,
        accepted=accepted,
        emitted=min(later, accepted + steps),
        prompt_tokens=usage.prompt_tokens if usage.prompt_tokens is not None else found.tokens_evaluated,
        cached_tokens=usage.cached_tokens if timings.cache_n is None else timings.cache_n,
        output_tokens=timings.predicted_n,
        time_per_output_token_seconds=seconds(timings.predicted_per_token_ms),
    )
