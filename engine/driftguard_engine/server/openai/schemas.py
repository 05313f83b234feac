"""The request bodies: OpenAI's fields, and extensions named as in vLLM. Any other field is refused by name.

A null means the default, as in OpenAI's API. A field that this engine does not implement is accepted only
with the value under which it has no effect.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from driftguard_engine.core import MAX_STOP_STRINGS
from driftguard_engine.server.body import NOT_TEXT, Body, FieldError, Text

MAX_CHOICES = 16
MAX_SEQUENCES = 128  # of one request: prompts times choices
MAX_STOP_CHARACTERS = 1_000  # of each stop string
DEFAULT_COMPLETION_TOKENS = 16


def _only(*accepted: object) -> AfterValidator:
    """For a field that is not implemented: accepts only these values, under which it has no effect."""

    def check(value: object) -> object:
        if any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted):
            return value
        alternative = f" or give {json.dumps(accepted[0])}" if accepted else ""
        raise ValueError(f"is not supported; leave it out{alternative}")

    return AfterValidator(check)


def _must_be(rule: str) -> WrapValidator:
    """For a union: one error message, instead of one per member."""

    def check(value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        try:
            return handler(value)
        except ValidationError as error:
            if any(item["msg"].endswith(NOT_TEXT) for item in error.errors(include_url=False)):
                raise ValueError(NOT_TEXT) from None
            raise ValueError(f"must be {rule}") from None

    return WrapValidator(check)


def _not_empty(value: Any) -> Any:
    if value == []:
        raise ValueError("must not be an empty list")
    return value


def _few_prompts(value: Any) -> Any:
    """Before each of them is checked, on the event loop."""
    if isinstance(value, list) and len(value) > MAX_SEQUENCES and not isinstance(value[0], int):
        raise FieldError("prompt", f"{len(value)} prompts; one request may have at most {MAX_SEQUENCES}")
    return value


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Unsupported = Annotated[Any, _only()]
OnlyFalse = Annotated[Any, _only(False)]
OnlyTrue = Annotated[Any, _only(True)]
OnlyZero = Annotated[Any, _only(0)]
OnlyOne = Annotated[Any, _only(1)]
OnlyEmptyText = Annotated[Any, _only("")]
OnlyEmptyList = Annotated[Any, _only([])]
OnlyEmptyObject = Annotated[Any, _only({})]
OnlyTextModality = Annotated[Any, _only(["text"])]
OnlyTextFormat = Annotated[Any, _only({"type": "text"})]
OnlyNoTool = Annotated[Any, _only("none", "auto")]

# Checking stops at the first wrong item: a million errors take seconds, on the event loop.
Texts = Annotated[list[Text], Field(fail_fast=True)]
TokenIds = Annotated[list[int], Field(fail_fast=True)]
Prompt = Annotated[
    Text | Texts | TokenIds | Annotated[list[TokenIds], Field(fail_fast=True)],
    _must_be("a string, a list of strings, a list of token ids, or a list of lists of token ids"),
    AfterValidator(_not_empty),
    BeforeValidator(_few_prompts),
]
StopText = Annotated[Text, Field(min_length=1, max_length=MAX_STOP_CHARACTERS)]
Stop = Annotated[
    list[StopText], Field(fail_fast=True, max_length=MAX_STOP_STRINGS), BeforeValidator(_as_list)
]


class StreamOptions(Body):
    include_usage: bool = False
    continuous_usage_stats: bool = False  # vLLM's extension; as there nothing without include_usage
    include_obfuscation: OnlyFalse = None


class _Generation(Body):
    """What completions and chat completions share."""

    model: str | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    temperature: Annotated[float, Field(ge=0, le=2)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None  # -1: as if it were not given
    stop: Stop = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None

    # vLLM's extensions
    top_k: Annotated[int, Field(ge=-1)] = 0
    ignore_eos: bool = False
    num_speculative_tokens: Annotated[int, Field(ge=0)] | None = None

    # labels that never change an answer
    user: str | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None

    # not implemented; OpenAI's, then vLLM's, which clients of vLLM send at their defaults
    frequency_penalty: OnlyZero = None
    presence_penalty: OnlyZero = None
    logit_bias: OnlyEmptyObject = None
    repetition_penalty: OnlyOne = None
    length_penalty: OnlyOne = None
    min_p: OnlyZero = None
    min_tokens: OnlyZero = None
    stop_token_ids: OnlyEmptyList = None
    use_beam_search: OnlyFalse = None
    include_stop_str_in_output: OnlyFalse = None
    skip_special_tokens: OnlyTrue = None

    @model_validator(mode="after")
    def _stream_options_need_stream(self) -> _Generation:
        if self.stream_options is not None and not self.stream:
            raise FieldError("stream_options", "is allowed only with stream true")
        return self

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def has_usage_in_each_chunk(self) -> bool:
        options = self.stream_options
        return options is not None and options.include_usage and options.continuous_usage_stats


class CompletionBody(_Generation):
    prompt: Prompt
    max_tokens: Annotated[int, Field(ge=1)] = DEFAULT_COMPLETION_TOKENS
    best_of: int | None = None
    echo: OnlyFalse = None
    logprobs: OnlyFalse = None
    suffix: OnlyEmptyText = None

    @model_validator(mode="after")
    def _best_of_is_n(self) -> CompletionBody:
        if self.best_of not in (None, self.n):
            raise FieldError("best_of", "is not supported; leave it out or give the value of n")
        return self

    def prompts(self) -> Sequence[str | list[int]]:
        """One entry per prompt, each a text or its token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt


class TextPart(Body):
    type: Literal["text"]
    text: Text


class Message(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[
        Text | Annotated[list[TextPart], Field(fail_fast=True)],
        _must_be('a string or a list of parts {"type": "text", "text": "..."}'),
    ] = ""
    name: Text | None = None

    def for_template(self) -> dict[str, str]:
        content = self.content
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        name = {} if self.name is None else {"name": self.name}
        return {"role": self.role, "content": text, **name}


class ChatBody(_Generation):
    messages: Annotated[list[Message], Field(fail_fast=True, min_length=1)]
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    audio: Unsupported = None
    functions: OnlyEmptyList = None
    function_call: OnlyNoTool = None
    logprobs: OnlyFalse = None
    modalities: OnlyTextModality = None
    parallel_tool_calls: bool | None = None
    response_format: OnlyTextFormat = None
    store: OnlyFalse = None
    tools: OnlyEmptyList = None
    tool_choice: OnlyNoTool = None
    top_logprobs: OnlyZero = None

    @model_validator(mode="after")
    def _one_maximum(self) -> ChatBody:
        if None not in (self.max_tokens, self.max_completion_tokens):
            raise FieldError(
                "max_tokens", "is the older name of max_completion_tokens; give only one of the two"
            )
        return self
