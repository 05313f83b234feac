"""SGLang: `meta_info` of /generate; `sglext.spec_tokens_details` of the OpenAI API, which has to be asked for
with `return_spec_tokens_details`. Both use the same names; versions before 0.5.20 others, read here too.
"""

from __future__ import annotations

from typing import Final

import msgspec

from driftguard.adapters.answers.counts import AnswerCounts, decoded, emitted, per_position
from driftguard.adapters.answers.openai import Usage

REQUEST_FIELD: Final = "return_spec_tokens_details"
EXTENSION: Final = "sglext"
DETAILS: Final = "spec_tokens_details"
# Weight versions that a live update sets, with the draft's version behind them.
LOADED: Final = "driftguard:"
LOADING: Final = "driftguard-loading:"


class _Details(msgspec.Struct, frozen=True):
    spec_verify_ct: int | None = None
    spec_num_proposed_drafts: int | None = None
    spec_num_correct_drafts: int | None = None
    spec_correct_drafts_histogram: list[int] | None = None
    spec_draft_token_num: int | None = None  # older name of spec_num_proposed_drafts
    spec_accept_token_num: int | None = None  # of spec_num_correct_drafts
    spec_accept_histogram: list[int] | None = None  # of spec_correct_drafts_histogram
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None


class _Extension(msgspec.Struct, frozen=True):
    spec_tokens_details: _Details | None = None


class _ModelInfo(msgspec.Struct, frozen=True):
    weight_version: str | None = None


class _Answer(msgspec.Struct, frozen=True):
    usage: Usage | None = None
    sglext: _Extension | None = None
    meta_info: _Details | None = None


def counts_in(answer: bytes) -> AnswerCounts | None:
    """None where the answer has no speculative numbers. Raises AnswerUnreadable."""
    found = decoded(answer, _Answer)
    if found.meta_info is not None:
        told = found.meta_info
        return _counts(told, told.prompt_tokens, told.cached_tokens, told.completion_tokens)
    if found.sglext is None or found.sglext.spec_tokens_details is None:
        return None
    usage = found.usage or Usage()
    details = found.sglext.spec_tokens_details
    return _counts(details, usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens)


def weight_version_in(model_info: bytes) -> str:
    """Of an answer of /model_info; "" if it has none. Raises AnswerUnreadable."""
    return decoded(model_info, _ModelInfo).weight_version or ""


def _counts(
    details: _Details, prompt_tokens: int | None, cached_tokens: int | None, output_tokens: int | None
) -> AnswerCounts | None:
    steps = details.spec_verify_ct
    drafted = _first(details.spec_num_proposed_drafts, details.spec_draft_token_num)
    accepted = _first(details.spec_num_correct_drafts, details.spec_accept_token_num)
    if not steps or drafted is None or accepted is None:
        return None
    return AnswerCounts(
        steps=steps,
        drafted=drafted,
        accepted=accepted,
        emitted=emitted(steps, accepted, output_tokens),
        accepted_per_position=per_position(
            details.spec_correct_drafts_histogram or details.spec_accept_histogram
        ),
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        output_tokens=output_tokens,
    )


def _first(new: int | None, old: int | None) -> int | None:
    return old if new is None else new
