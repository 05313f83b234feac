"""OpenAI's response objects from finished requests. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from driftguard_engine.core import FinishedRequest

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ResponseHead:
    """What every object of one response repeats. created: Unix seconds."""

    response_id: str
    created: int
    model: str
    is_chat: bool

    def body(self, *, streamed: bool, choices: list[Json]) -> Json:
        if self.is_chat:
            kind = "chat.completion.chunk" if streamed else "chat.completion"
        else:
            kind = "text_completion"
        return {
            "id": self.response_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def whole_response(head: ResponseHead, finished: Sequence[FinishedRequest], usage: Json) -> Json:
    """finished: in the order of the choices."""
    choices: list[Json] = []
    for index, one in enumerate(finished):
        content: Json
        if head.is_chat:
            content = {"message": {"role": "assistant", "content": one.text}}
        else:
            content = {"text": one.text}
        choices.append({"index": index, **content, "logprobs": None, "finish_reason": one.finish_reason})
    body = head.body(streamed=False, choices=choices)
    return body | {"usage": usage, "metrics": response_metrics(finished)}


def first_chat_chunk(head: ResponseHead, index: int) -> Json:
    return _chunk(head, index, {"delta": {"role": "assistant", "content": ""}}, None)


def text_chunk(head: ResponseHead, index: int, text: str, finish_reason: str | None) -> Json:
    if not head.is_chat:
        return _chunk(head, index, {"text": text}, finish_reason)
    return _chunk(head, index, {"delta": {"content": text} if text else {}}, finish_reason)


def usage_chunk(head: ResponseHead, finished: Sequence[FinishedRequest], usage: Json) -> Json:
    """The last chunk of a stream with `include_usage`; the only one that carries metrics."""
    return head.body(streamed=True, choices=[]) | {"usage": usage, "metrics": response_metrics(finished)}


def _chunk(head: ResponseHead, index: int, content: Json, finish_reason: str | None) -> Json:
    choice = {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}
    return head.body(streamed=True, choices=[choice])


def usage_of(prompt_lengths: Sequence[int], finished: Sequence[FinishedRequest]) -> Json:
    """A prompt counts once, however many choices it has."""
    prompt = sum(prompt_lengths)
    output = sum(len(one.output_token_ids) for one in finished)
    choices = len(finished) // len(prompt_lengths)
    return tokens_of(prompt, output) | {
        "prompt_tokens_details": {
            # Of a prompt with several choices: the tokens that no choice had to compute.
            "cached_tokens": sum(
                min(one.reused_prompt_tokens for one in finished[first : first + choices])
                for first in range(0, len(finished), choices)
            )
        },
    }


def tokens_of(prompt: int, output: int) -> Json:
    return {"prompt_tokens": prompt, "completion_tokens": output, "total_tokens": prompt + output}


def response_metrics(finished: Sequence[FinishedRequest]) -> Json:
    """vLLM's `metrics` object. `speculative_decoding` describes one sequence, so it is null for n > 1."""
    if len(finished) != 1:
        return {"speculative_decoding": None}
    return {"speculative_decoding": _speculation(finished[0]), **_timing(finished[0])}


def _speculation(finished: FinishedRequest) -> Json | None:
    """As vLLM defines it: mean_acceptance_length is 1 + accepted / steps (the last bonus counts even if cut).

    acceptance_histogram[j] = steps that accepted exactly j draft tokens, j from 0 to num_spec_tokens.
    """
    counts, limit = finished.counts, finished.num_speculative_tokens
    if limit == 0 or finished.draft.method == "none":
        return None
    histogram = counts.acceptance_histogram + [0] * (limit + 1 - len(counts.acceptance_histogram))
    return {
        "mean_acceptance_length": 1 + counts.accepted / counts.steps if counts.steps else None,
        "draft_acceptance_rate": counts.accepted / counts.drafted if counts.drafted else None,
        "acceptance_histogram": histogram,
        "num_spec_steps": counts.steps,
        "num_accepted_draft_tokens": counts.accepted,
        "num_draft_tokens": counts.drafted,
        "num_spec_tokens": limit,
    }


def _timing(finished: FinishedRequest) -> Json:
    """generation_time_ms: from the first token to the end. An unknown value is null."""
    first, each = finished.time_to_first_token_seconds, finished.time_per_output_token_seconds
    total_seconds = (finished.ended_at - finished.started_at).total_seconds()
    return {
        "time_to_first_token_ms": None if first is None else first * 1000,
        "generation_time_ms": None if first is None else max(0.0, total_seconds - first) * 1000,
        "mean_itl_ms": None if each is None else each * 1000,
        "tokens_per_second": len(finished.output_token_ids) / total_seconds if total_seconds > 0 else None,
    }
