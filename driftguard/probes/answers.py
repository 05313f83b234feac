"""What a server says about one answer: the counts of `metrics.speculative_decoding`, as vLLM names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from driftguard.errors import DriftGuardError
from driftguard.probe_sessions import digest


class ProbeFailed(DriftGuardError):
    """The probes could not be replayed; the message says which address and why."""

    status = 502
    title = "Probe failed"


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


class _Message(msgspec.Struct, frozen=True):
    content: str | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    message: _Message | None = None


class _Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class _Answer(msgspec.Struct, frozen=True):
    choices: list[_Choice]
    usage: _Usage | None = None
    metrics: _Metrics | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Counts of one answer. `text`: a digest; what was said is nobody's business here."""

    text: str
    steps: int
    drafted: int
    accepted: int
    num_speculative_tokens: int | None
    accepted_per_position: list[int] | None
    prompt_tokens: int | None
    output_tokens: int | None
    time_to_first_token_seconds: float | None
    time_per_output_token_seconds: float | None


def parse_answer(content: bytes, url: str) -> Answer:
    """Raises ProbeFailed: not an answer of an OpenAI-compatible server, or one without the numbers."""
    try:
        answer = msgspec.json.decode(content, type=_Answer)
        choice = answer.choices[0]
    except (msgspec.DecodeError, UnicodeDecodeError, IndexError) as error:
        raise ProbeFailed(f"{url}: not the answer of an OpenAI-compatible server ({error})") from None
    metrics = answer.metrics or _Metrics()
    counts = metrics.speculative_decoding
    if counts is None:
        raise ProbeFailed(
            f"{url} answers without metrics.speculative_decoding, so its probes tell nothing: speculation is "
            "off, or vLLM was not started with --per-request-spec-decode-metrics summary"
        )
    usage = answer.usage or _Usage()
    text = choice.text if choice.message is None else choice.message.content
    return Answer(
        text=digest((text or "").encode()),
        steps=counts.num_spec_steps,
        drafted=counts.num_draft_tokens,
        accepted=counts.num_accepted_draft_tokens,
        num_speculative_tokens=counts.num_spec_tokens,
        accepted_per_position=_per_position(counts.acceptance_histogram),
        prompt_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        time_to_first_token_seconds=_seconds(metrics.time_to_first_token_ms),
        time_per_output_token_seconds=_seconds(metrics.mean_itl_ms),
    )


def _per_position(histogram: list[int] | None) -> list[int] | None:
    """histogram[j] steps accepted exactly j tokens, so position i was accepted in sum_{j > i} of them."""
    if histogram is None:
        return None
    return [sum(histogram[place + 1 :]) for place in range(len(histogram) - 1)]


def _seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1_000


def detail_of(content: bytes) -> str:
    """The reason in an error's body, in OpenAI's form or any other, in one line."""
    try:
        body: Any = msgspec.json.decode(content)
        error = body["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    except (msgspec.DecodeError, KeyError, TypeError, UnicodeDecodeError):
        return " ".join(content[:200].decode(errors="replace").split())
