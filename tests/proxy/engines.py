"""The HTTP answers of serving engines: what each answers to a request, in its own format and to the byte."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"
TEXT = ['He said: "usage": {}, ', "naïve 日本\\n", "\n\ndata: [DONE]", " end"]

VLLM_SPECULATION = {
    "mean_acceptance_length": 1.2325581395348837,
    "draft_acceptance_rate": 0.07751937984496124,
    "acceptance_histogram": [39, 1, 0, 3],
    "num_spec_steps": 43,
    "num_accepted_draft_tokens": 10,
    "num_draft_tokens": 129,
    "num_spec_tokens": 3,
}
VLLM_FINGERPRINT = {"system_fingerprint": "vllm-0.32.0-a6e9d0c2"}
SGLANG_DETAILS = {
    "spec_accept_rate": 0.2930232558139535,
    "spec_accept_length": 2.4651162790697674,
    "spec_num_correct_drafts": 63,
    "spec_num_proposed_drafts": 215,
    "spec_verify_ct": 43,
    "spec_correct_drafts_histogram": [11, 14, 11, 4, 0, 3],
}
LLAMACPP_TIMINGS = {
    "prompt_n": 1,
    "prompt_ms": 228.522,
    "predicted_n": 200,
    "predicted_ms": 11082.606,
    "predicted_per_token_ms": 55.41303,
    "draft_n": 347,
    "draft_n_accepted": 65,
}
TRTLLM_STATISTICS = {
    "acceptance_rate": 0.5,
    "total_accepted_draft_tokens": 30,
    "total_draft_tokens": 60,
    "num_spec_steps": 20,
    "acceptance_histogram": [8, 0, 6, 6],
    "num_spec_tokens": 3,
}
TRITON_METRICS = {
    "acceptance_rate": "0.5",
    "arrival_time_ns": "76735247746000",
    "first_scheduled_time_ns": "76735248284000",
    "first_token_time_ns": "76735374300000",
    "kv_cache_alloc_new_blocks": "1",
    "kv_cache_hit_rate": "0.0",
    "last_token_time_ns": "76736545324000",
    "total_accepted_draft_tokens": "20",
    "total_draft_tokens": "40",
}


@dataclass(frozen=True)
class Style:
    """How an engine writes JSON and ends an event."""

    separators: tuple[str, str] = (",", ":")
    newline: str = "\n"

    def json(self, value: Json) -> bytes:
        return json.dumps(value, separators=self.separators, ensure_ascii=False).encode()

    def event(self, value: Json) -> bytes:
        return b"data: " + self.json(value) + 2 * self.newline.encode()


COMPACT = Style()
SPACED = Style((", ", ": "), "\r\n")
Answer = bytes | list[bytes]  # whole, or the events of a stream


def wants(request: Json, *path: str) -> bool:
    value: Any = request
    for name in path:
        value = value.get(name) if isinstance(value, dict) else None
    return value is True


def _head(request: Json, kind: str) -> Json:
    return {"id": "cmpl-1", "object": kind, "created": 1763780000, "model": request["model"]}


def _usage(completion: int) -> Json:
    return {"prompt_tokens": 11, "total_tokens": 11 + completion, "completion_tokens": completion}


def _deltas(request: Json, **more: Any) -> list[Json]:
    head = _head(request, "chat.completion.chunk")
    choice = {"index": 0, "logprobs": None, "finish_reason": None}
    chunks = [{"role": "assistant", "content": ""}, *({"content": text} for text in TEXT)]
    last: Json = {**choice, "delta": {}, "finish_reason": "stop"}
    return [
        *({**head, "choices": [{**choice, "delta": delta}], **more} for delta in chunks),
        {**head, "choices": [last], **more},
    ]


def vllm(request: Json, style: Style = COMPACT, speculation: Json | None = VLLM_SPECULATION) -> Answer:
    """Ends on the stop string where the request has one, and then tells no counts. Usage in every event only
    where usage is asked for as well. Its fingerprint is in the last event, whichever that is."""
    stopped = {"finish_reason": "stop", "stop_reason": request.get("stop")}
    speculation = None if request.get("stop") else speculation
    metrics = {"speculative_decoding": speculation, "time_to_first_token_ms": 12.0, "mean_itl_ms": 20.0}
    if not wants(request, "stream"):
        message = {"role": "assistant", "content": "".join(TEXT)}
        choices = [{"index": n, "message": message, **stopped} for n in range(request.get("n", 1))]
        return style.json(
            {
                **_head(request, "chat.completion"),
                "choices": choices,
                **VLLM_FINGERPRINT,
                "usage": _usage(53),
                "metrics": metrics,
            }
        )
    has_usage = wants(request, "stream_options", "include_usage")
    in_all = has_usage and wants(request, "stream_options", "continuous_usage_stats")
    chunks = _deltas(request, **({"usage": _usage(1)} if in_all else {}))
    chunks[-1]["choices"][0] |= stopped
    if has_usage:
        end = {"choices": [], "usage": _usage(53), **VLLM_FINGERPRINT, "metrics": metrics}
        chunks.append({**_head(request, "chat.completion.chunk"), **end})
    else:
        chunks[-1] |= VLLM_FINGERPRINT
    return [*map(style.event, chunks), DONE]


def sglang(request: Json, style: Style = COMPACT) -> Answer:
    extension: Json = {}
    if wants(request, "return_cached_tokens_details"):
        extension["cached_tokens_details"] = {"device": 3, "host": 0}
    if wants(request, "return_spec_tokens_details"):
        extension["spec_tokens_details"] = SGLANG_DETAILS
    told = {"sglext": extension} if extension else {}
    if not wants(request, "stream"):
        choices = [{"index": 0, "message": {"role": "assistant", "content": "".join(TEXT)}}]
        return style.json(
            {**_head(request, "chat.completion"), "choices": choices, "usage": _usage(106), **told}
        )
    chunks = _deltas(request, usage=None)
    head = _head(request, "chat.completion.chunk")
    if told:
        chunks.append({**head, "choices": [], "usage": None, **told})
    if wants(request, "return_output_ids"):  # in an event of their own for routers that ask for that
        chunks.append({**head, "choices": [], "usage": None, "sglext": {"output_ids": [[7, 8]]}})
    if wants(request, "stream_options", "include_usage"):
        chunks.append({**head, "choices": [], "usage": _usage(106)})
    return [*map(style.event, chunks), DONE]


def sglang_generate(request: Json, style: Style = COMPACT) -> Answer:
    counts = {"prompt_tokens": 11, "completion_tokens": 106}
    if not wants(request, "stream"):
        return style.json({"text": "".join(TEXT), "meta_info": {"id": "a", **counts, **SGLANG_DETAILS}})
    texts = ["".join(TEXT[: n + 1]) for n in range(len(TEXT))]
    metas: list[Json] = [{"id": "a", "finish_reason": None} for _ in texts]
    metas[-1] = {"id": "a", "finish_reason": {"type": "stop"}, **counts, **SGLANG_DETAILS}
    pairs = zip(texts, metas, strict=True)
    return [*(style.event({"text": text, "meta_info": meta}) for text, meta in pairs), DONE]


def llamacpp(request: Json, style: Style = COMPACT) -> Answer:
    if not wants(request, "stream"):
        choices = [{"index": 0, "message": {"role": "assistant", "content": "".join(TEXT)}}]
        return style.json(
            {
                "choices": choices,
                **_head(request, "chat.completion"),
                "usage": _usage(200),
                "timings": LLAMACPP_TIMINGS,
            }
        )
    chunks = _deltas(request)
    if wants(request, "stream_options", "include_usage"):
        chunks.append({**_head(request, "chat.completion.chunk"), "choices": [], "usage": _usage(200)})
    chunks[-1]["timings"] = LLAMACPP_TIMINGS
    return [*map(style.event, chunks), DONE]


def llamacpp_completion(request: Json, style: Style = COMPACT) -> Answer:
    end = {"stop": True, "model": "m.gguf", "tokens_evaluated": 11, "timings": LLAMACPP_TIMINGS}
    if not wants(request, "stream"):
        return style.json({"content": "".join(TEXT), **end})
    events = [{"content": text, "stop": False} for text in TEXT]
    return [*map(style.event, events), style.event({"content": "", **end})]


def trtllm(request: Json, style: Style = COMPACT) -> Answer:
    if not wants(request, "stream"):
        message = {"role": "assistant", "content": "".join(TEXT)}
        choice = {"index": 0, "message": message, "speculative_decoding": TRTLLM_STATISTICS}
        return style.json({**_head(request, "chat.completion"), "choices": [choice], "usage": _usage(51)})
    chunks = _deltas(request)
    chunks[-1]["choices"][0]["speculative_decoding"] = TRTLLM_STATISTICS
    return [*map(style.event, chunks), DONE]


def triton(request: Json, style: Style = COMPACT) -> Answer:
    asked = wants(request, "sampling_param_return_perf_metrics")
    told = dict(TRITON_METRICS) if asked else {}
    names = {"model_name": "tensorrt_llm", "model_version": "1"}
    whole = dict(sorted({**told, **names, "text_output": "".join(TEXT)}.items()))
    if not wants(request, "stream"):
        return style.json(whole)
    events: list[Json] = [{**names, "text_output": text} for text in TEXT]
    return [*map(style.event, events), style.event(dict(sorted({**events[-1], **told}.items())))]


@dataclass(frozen=True)
class Case:
    """One way to ask one engine. counts: (steps, drafted, accepted, emitted)."""

    name: str
    engine: str
    path: str
    answer: Callable[..., Answer]
    request: Json
    counts: tuple[int, int, int, int]
    output_tokens: int | None


_CHAT: Json = {
    "model": "org/model",
    "messages": [{"role": "user", "content": "secret prompt"}],
    "temperature": 0,
}
_PATH = "/v1/chat/completions"
_VLLM = (43, 129, 10, 53)
_SGLANG = (43, 215, 63, 106)
_LLAMACPP = (134, 347, 65, 199)
_USAGE = {"stream_options": {"include_usage": True}}
_NO_USAGE = {"stream_options": {"include_usage": False}}
_USAGE_IN_ALL = {"stream_options": {"continuous_usage_stats": True}}
_DETAILS = {"return_spec_tokens_details": True}
_CACHED = {"return_cached_tokens_details": True}
_IDS = {"return_output_ids": True}
_PROMPT = {"prompt": "secret prompt"}
_STREAM = {"stream": True}
_TRITON_ASKS = {"sampling_param_return_perf_metrics": True}
_TRITON_PATH = "/v2/models/tensorrt_llm/generate"

CASES = [
    Case("vllm", "vllm", _PATH, vllm, _CHAT, _VLLM, 53),
    Case("vllm stream", "vllm", _PATH, vllm, _CHAT | _STREAM, _VLLM, 53),
    Case("vllm stream, usage refused", "vllm", _PATH, vllm, _CHAT | _STREAM | _NO_USAGE, _VLLM, 53),
    Case("vllm stream, usage asked", "vllm", _PATH, vllm, _CHAT | _STREAM | _USAGE, _VLLM, 53),
    Case("vllm stream, usage in all", "vllm", _PATH, vllm, _CHAT | _STREAM | _USAGE_IN_ALL, _VLLM, 53),
    Case(
        "vllm stream, usage asked, in all", "vllm", _PATH, vllm,
        _CHAT | _STREAM | {"stream_options": {"include_usage": True} | _USAGE_IN_ALL["stream_options"]},
        _VLLM, 53,
    ),
    Case("sglang", "sglang", _PATH, sglang, _CHAT, _SGLANG, 106),
    Case("sglang, details asked", "sglang", _PATH, sglang, _CHAT | _DETAILS, _SGLANG, 106),
    Case("sglang, other details asked", "sglang", _PATH, sglang, _CHAT | _CACHED, _SGLANG, 106),
    Case("sglang stream", "sglang", _PATH, sglang, _CHAT | _STREAM, _SGLANG, 106),
    Case("sglang stream, usage asked", "sglang", _PATH, sglang, _CHAT | _STREAM | _USAGE, _SGLANG, 106),
    Case("sglang stream, details asked", "sglang", _PATH, sglang, _CHAT | _STREAM | _DETAILS, _SGLANG, 106),
    Case("sglang stream, others asked", "sglang", _PATH, sglang, _CHAT | _STREAM | _CACHED, _SGLANG, 106),
    Case("sglang stream, tokens asked", "sglang", _PATH, sglang, _CHAT | _STREAM | _IDS, _SGLANG, 106),
    Case("sglang generate", "sglang", "/generate", sglang_generate, {"text": "secret prompt"}, _SGLANG, 106),
    Case(
        "sglang generate stream", "sglang", "/generate", sglang_generate,
        {"text": "secret prompt"} | _STREAM, _SGLANG, 106,
    ),
    Case("llamacpp", "llamacpp", _PATH, llamacpp, _CHAT, _LLAMACPP, 200),
    Case("llamacpp stream", "llamacpp", _PATH, llamacpp, _CHAT | _STREAM, _LLAMACPP, 200),
    Case(
        "llamacpp stream, usage asked", "llamacpp", _PATH, llamacpp,
        _CHAT | _STREAM | _USAGE, _LLAMACPP, 200,
    ),
    Case("llamacpp completion", "llamacpp", "/completion", llamacpp_completion, _PROMPT, _LLAMACPP, 200),
    Case(
        "llamacpp completion stream", "llamacpp", "/completion", llamacpp_completion,
        _PROMPT | _STREAM, _LLAMACPP, 200,
    ),
    Case("trtllm", "other", _PATH, trtllm, _CHAT, (20, 60, 30, 50), 51),
    Case("trtllm stream", "other", _PATH, trtllm, _CHAT | _STREAM, (20, 60, 30, 50), None),
    Case("triton", "other", _TRITON_PATH, triton, {"text_input": "secret prompt"}, (10, 40, 20, 30), None),
    Case(
        "triton, metrics asked", "other", _TRITON_PATH, triton,
        {"text_input": "secret prompt"} | _TRITON_ASKS, (10, 40, 20, 30), None,
    ),
    Case(
        "triton stream", "other", _TRITON_PATH + "_stream", triton,
        {"text_input": "secret prompt"} | _STREAM, (10, 40, 20, 30), None,
    ),
]  # fmt: skip
