"""Reads the counts in an answer of any engine: each uses names of its own."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from msgspec import structs

from driftguard.adapters.answers import llamacpp, sglang, triton, trtllm, vllm
from driftguard.adapters.answers.counts import AnswerCounts
from driftguard.adapters.answers.openai import common

_NAMES: Final = (
    b"usage", b"metrics", b"speculative_decoding", b"spec_tokens_details", b"meta_info", b"timings",
    b"total_draft_tokens", b"stop_reason",
)  # fmt: skip
# A quote inside a JSON string is escaped, so a name with its quotes and a colon is always a member's name.
# Looking for each quoted name first is far cheaper than one expression for all, which stops at every quote.
_TELLING: Final = tuple(
    (name, quoted, re.compile(re.escape(quoted) + rb"\s*:(?!\s*null)").search)
    for name, quoted in ((name, b'"' + name + b'"') for name in _NAMES)
)


def members_with_counts(text: bytes) -> list[bytes]:
    """Names of the members, at any depth, that may hold counts of the request."""
    return [name for name, quoted, search in _TELLING if quoted in text and search(text)]


def parts_of(answer: bytes) -> dict[bytes, bytes]:
    """Of an answer that is not streamed: see counts_of."""
    return dict.fromkeys(members_with_counts(answer), answer)


def counts_of(parts: Mapping[bytes, bytes], num_speculative_tokens: int | None) -> AnswerCounts | None:
    """`parts`: name of a member with counts -> the newest answer or event that has it.

    None if the engine gives no counts of speculation. Raises AnswerUnreadable, SettingNeeded.
    """
    found = _speculation(parts, num_speculative_tokens)
    if found is not None and found.output_tokens is None and b"usage" in parts:
        prompt, cached, output = token_counts(parts)
        return structs.replace(found, prompt_tokens=prompt, cached_tokens=cached, output_tokens=output)
    return found


def _speculation(parts: Mapping[bytes, bytes], num_speculative_tokens: int | None) -> AnswerCounts | None:
    if b"metrics" in parts and (found := vllm.counts_in(parts[b"metrics"])):
        return found
    if b"speculative_decoding" in parts and (found := trtllm.counts_in(parts[b"speculative_decoding"])):
        return found
    for name in (b"spec_tokens_details", b"meta_info"):
        if name in parts and (found := sglang.counts_in(parts[name])):
            return found
    if b"timings" in parts:
        return llamacpp.counts_in(parts[b"timings"], num_speculative_tokens)
    if b"total_draft_tokens" in parts:
        return triton.counts_in(parts[b"total_draft_tokens"], num_speculative_tokens)
    return None


def ended_on_stop_string(parts: Mapping[bytes, bytes]) -> bool:
    """Whether the answer is one of vLLM's to a request that ended so, which have no counts. Raises
    AnswerUnreadable."""
    return b"stop_reason" in parts and vllm.ended_on_stop_string(parts[b"stop_reason"])


def token_counts(parts: Mapping[bytes, bytes]) -> tuple[int | None, int | None, int | None]:
    """(prompt tokens, those of them from the prefix cache, output tokens), if the answer has a usage. Raises
    AnswerUnreadable."""
    usage = common(parts[b"usage"]).usage if b"usage" in parts else None
    if usage is None:
        return None, None, None
    return usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens
