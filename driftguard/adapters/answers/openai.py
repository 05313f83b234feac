"""What every OpenAI-compatible answer, or event of a streamed one, has in common: model, usage, choices."""

from __future__ import annotations

from typing import Any

import msgspec

from driftguard.adapters.answers.counts import AnswerUnreadable, decoded


class PromptDetails(msgspec.Struct, frozen=True):
    cached_tokens: int | None = None


class Usage(msgspec.Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: PromptDetails | None = None

    @property
    def cached_tokens(self) -> int | None:
        """Of the prompt, from the prefix cache; None where the engine does not tell."""
        return self.prompt_tokens_details.cached_tokens if self.prompt_tokens_details else None


class Common(msgspec.Struct, frozen=True):
    """`choices` are not looked into; a streamed answer's last event has none."""

    model: str | None = None
    usage: Usage | None = None
    choices: list[msgspec.Raw] | None = None


class _Delta(msgspec.Struct, frozen=True):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct, frozen=True):
    text: str | None = None
    delta: _Delta | None = None


class _Event(msgspec.Struct, frozen=True):
    choices: list[_Choice] | None = None
    delta: Any = None  # /v1/responses, /v1/messages
    text: str | None = None  # SGLang /generate
    content: str | None = None  # llama.cpp /completion
    text_output: str | None = None  # Triton
    token: Any = None  # TGI


def common(answer: bytes) -> Common:
    """Raises AnswerUnreadable."""
    return decoded(answer, Common)


def has_output(event: bytes) -> bool:
    """Whether an event of a streamed answer has generated text. An event that announces the role,
    reports progress or cannot be parsed does not."""
    try:
        found = decoded(event, _Event)
    except AnswerUnreadable:
        return False
    if found.choices:
        return any(_has_output(choice) for choice in found.choices)
    return bool(found.delta or found.text or found.content or found.text_output or found.token)


def _has_output(choice: _Choice) -> bool:
    if choice.delta is None:
        return bool(choice.text)
    delta = choice.delta
    return bool(delta.content or delta.reasoning_content or delta.reasoning or delta.tool_calls)
