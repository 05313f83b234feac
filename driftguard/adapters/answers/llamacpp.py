"""llama.cpp's server: `timings`, in every answer and in the last event of a streamed one.

`draft_n` is left out if nothing was drafted, which is also the case if the server does not speculate. The
first token comes from reading the prompt; each later forward pass emits one token and the accepted ones.

Passes with a draft are not told. Where only one token may still be generated nothing is drafted
(`get_n_draft_max` in tools/server/server-context.cpp), so the last pass of an answer that reached its length
may be one without. It is taken for that if all others could have drafted what was drafted: that needs K.
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
    prompt_n: int | None = None  # prompt tokens that were processed
    cache_n: int | None = None  # prompt tokens reused from the cache


class _Choice(msgspec.Struct, frozen=True):
    finish_reason: str | None = None


class _Answer(msgspec.Struct, frozen=True):
    usage: Usage | None = None
    timings: _Timings | None = None
    choices: list[_Choice] | None = None
    stop_type: str | None = None  # of /completion

    @property
    def reached_its_length(self) -> bool:
        return self.stop_type == "limit" or any(one.finish_reason == "length" for one in self.choices or ())


def counts_in(answer: bytes, num_speculative_tokens: int | None = None) -> AnswerCounts | None:
    """None if the answer has no timings. Raises AnswerUnreadable."""
    found = decoded(answer, _Answer)
    timings, usage = found.timings, found.usage or Usage()
    if timings is None:
        return None
    accepted, later = timings.draft_n_accepted, max(timings.predicted_n - 1, 0)
    # An answer that ends inside an accepted run has fewer tokens than were accepted and sampled.
    passes = max(later - accepted, 1 if timings.draft_n else 0)
    steps = passes
    if num_speculative_tokens is not None and found.reached_its_length and passes:
        steps -= timings.draft_n <= num_speculative_tokens * (passes - 1)
    return AnswerCounts(
        steps=steps,
        drafted=timings.draft_n,
        accepted=accepted,
        emitted=min(later, accepted + steps),
        prompt_tokens=_prompt_tokens(timings, usage),
        cached_tokens=usage.cached_tokens if timings.cache_n is None else timings.cache_n,
        output_tokens=timings.predicted_n,
        time_per_output_token_seconds=seconds(timings.predicted_per_token_ms),
    )


def _prompt_tokens(timings: _Timings, usage: Usage) -> int | None:
    if usage.prompt_tokens is not None or timings.prompt_n is None:
        return usage.prompt_tokens
    return timings.prompt_n + (timings.cache_n or 0)
