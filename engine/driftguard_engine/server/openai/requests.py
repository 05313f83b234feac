"""Request bodies -> the engine's Requests: encoding of prompts, chat templates, seeds, traffic headers."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from jinja2 import TemplateError

from driftguard_engine.core import InvalidRequest, Request, SamplingParams
from driftguard_engine.server.errors import shortened
from driftguard_engine.server.openai.schemas import MAX_SEQUENCES, ChatBody, CompletionBody
from driftguard_engine.server.prompt_limit import PromptLimit

SEGMENT_HEADER = "X-DriftGuard-Segment"
SESSION_HEADER = "X-DriftGuard-Session"
MAX_LABEL_LENGTH = 256
SEED_RANGE = 2**63


class ModelNotFound(InvalidRequest):
    """model: no such model; names the one that is served"""

    status = 404
    code = "model_not_found"


def check_model(asked: str | None, served: str) -> None:
    """Raises ModelNotFound. A request that names no model gets the only one."""
    if asked is not None and asked != served:
        raise ModelNotFound(
            f"model: there is no model {shortened(asked)!r}; this server serves {served!r}", field="model"
        )


def encode_prompts(tokenizer: Any, limit: PromptLimit, body: CompletionBody) -> list[list[int]]:
    """Token ids per prompt; texts get the tokenizer's special tokens, given ids are taken as they are.

    Raises InvalidRequest: too many, or one that is too long for the context.
    """
    prompts = body.prompts()
    _check_sequences(len(prompts), body.n)
    for prompt in prompts:
        if isinstance(prompt, str):
            limit.check_text("prompt", len(prompt))
        else:
            limit.check_tokens("prompt", prompt)
    return [
        tokenizer.encode(prompt, verbose=False) if isinstance(prompt, str) else list(prompt)
        for prompt in prompts
    ]


def encode_chat(tokenizer: Any, limit: PromptLimit, body: ChatBody) -> list[int]:
    """The chat template's text as token ids. Raises InvalidRequest: no template, refused by it, or too long
    for the context."""
    if not tokenizer.chat_template:
        raise InvalidRequest(
            "messages: the model's tokenizer has no chat template; use /v1/completions", field="messages"
        )
    messages = [message.for_template() for message in body.messages]
    if "developer" not in str(tokenizer.chat_template):  # OpenAI's newer name; it would be left out
        messages = [each | {"role": "system"} if each["role"] == "developer" else each for each in messages]
    # Checked before the template, which takes long for many messages, and after it, as it may add text.
    limit.check_text("messages", sum(1 + len(message["content"]) for message in messages))
    try:
        text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    except TemplateError as error:
        raise InvalidRequest(
            f"messages: the model's chat template refuses them: {error}", field="messages"
        ) from None
    limit.check_text("messages", len(text))
    # The template has written the special tokens.
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False, verbose=False)
    return ids


def sampling_params(body: CompletionBody | ChatBody, max_tokens: int) -> SamplingParams:
    """The sampling parameters of the body. A seed is drawn at random where it gives none, or -1, as for
    vLLM and llama.cpp; others below 0, which OpenAI's API allows, stand for one of the engine's range."""
    seed = secrets.randbelow(SEED_RANGE) if body.seed is None or body.seed == -1 else body.seed
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=body.temperature,
        top_k=max(0, body.top_k),
        top_p=body.top_p,
        seed=seed % SEED_RANGE,
        stop=tuple(body.stop),
        num_speculative_tokens=body.num_speculative_tokens,
        ignore_eos=body.ignore_eos,
    )


def make_requests(
    response_id: str, prompts: Sequence[list[int]], n: int, params: SamplingParams, headers: Mapping[str, str]
) -> list[Request]:
    """One Request per choice, prompt by prompt. Choice j of every prompt samples with seed + j.

    So a prompt's choices do not depend on the prompts beside it. Raises InvalidRequest.
    """
    _check_sequences(len(prompts), n)
    arrived_at = datetime.now(UTC)
    segment = _label(headers, SEGMENT_HEADER) or "default"
    session = _label(headers, SESSION_HEADER)
    requests: list[Request] = []
    for prompt in map(tuple, prompts):
        for choice in range(n):
            requests.append(
                Request(
                    request_id=f"{response_id}-{len(requests)}",
                    prompt_token_ids=prompt,
                    params=replace(params, seed=(params.seed + choice) % SEED_RANGE),
                    arrived_at=arrived_at,
                    segment=segment,
                    session=session,
                )
            )
    return requests


def _check_sequences(prompts: int, n: int) -> None:
    if prompts * n > MAX_SEQUENCES:
        raise InvalidRequest(
            f"prompt: {prompts} prompts with n = {n} are {prompts * n} sequences; "
            f"one request may have at most {MAX_SEQUENCES}",
            field="prompt",
        )


def _label(headers: Mapping[str, str], name: str) -> str | None:
    value = headers.get(name)
    if not value:  # gateways fill the header from a value that may be missing
        return None
    try:
        text = value.encode("latin-1").decode()  # HTTP headers are bytes; we read them as UTF-8
    except UnicodeDecodeError:
        raise InvalidRequest(f"{name}: not valid UTF-8", field=name) from None
    if len(text) > MAX_LABEL_LENGTH:
        raise InvalidRequest(
            f"{name}: has {len(text)} characters, must have at most {MAX_LABEL_LENGTH}", field=name
        )
    return text
