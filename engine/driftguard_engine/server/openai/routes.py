"""OpenAI's API: completions, chat completions, models."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar
from uuid import uuid4

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from starlette.concurrency import run_in_threadpool

from driftguard_engine.core import (
    EngineError,
    EngineUnavailable,
    FinishedRequest,
    InvalidRequest,
    RequestOutput,
)
from driftguard_engine.server.dependencies import Service, TheService
from driftguard_engine.server.errors import openai_error
from driftguard_engine.server.openai.bodies import BoundedRoute
from driftguard_engine.server.openai.requests import (
    check_model,
    encode_chat,
    encode_prompts,
    make_requests,
    sampling_params,
)
from driftguard_engine.server.openai.responses import (
    Json,
    ResponseHead,
    first_chat_chunk,
    text_chunk,
    tokens_of,
    usage_chunk,
    usage_of,
    whole_response,
)
from driftguard_engine.server.openai.schemas import ChatBody, CompletionBody
from driftguard_engine.server.openai.sse import DONE, ClientGone, EventStream, event, unless_disconnected
from driftguard_engine.server.prompt_limit import PromptLimit
from driftguard_engine.server.runner import Submission

B = TypeVar("B", CompletionBody, ChatBody)
T = TypeVar("T")

router = APIRouter(prefix="/v1", route_class=BoundedRoute)
CLIENT_CLOSED_REQUEST = 499  # nginx's code for logs; the client that would read it has gone


class GenerationFailed(EngineError):
    """The engine ended the request with an error."""

    code = "generation_failed"


@router.post("/completions", response_model=None)
async def completions(body: CompletionBody, request: Request, service: TheService) -> Response:
    check_model(body.model, service.engine.target_name)
    try:
        prompts = await _tokenized(request, service, encode_prompts, body)
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    return await _answer(request, service, body, prompts, body.max_tokens)


@router.post("/chat/completions", response_model=None)
async def chat_completions(body: ChatBody, request: Request, service: TheService) -> Response:
    check_model(body.model, service.engine.target_name)
    try:
        prompt = await _tokenized(request, service, encode_chat, body)
    except ClientGone:
        return Response(status_code=CLIENT_CLOSED_REQUEST)
    room = service.engine.max_length - len(prompt)
    if room < 1:
        raise InvalidRequest(
            f"messages: {len(prompt)} tokens with the chat template, but the context is "
            f"{service.engine.max_length} and must hold one new token too",
            field="messages",
        )
    return await _answer(
        request, service, body, [prompt], body.max_completion_tokens or body.max_tokens or room
    )


@router.get("/models")
async def models(service: TheService) -> Json:
    return {"object": "list", "data": [_model(service)]}


@router.get("/models/{model:path}")
async def model(model: str, service: TheService) -> Json:
    check_model(model, service.engine.target_name)
    return _model(service)


def _model(service: Service) -> Json:
    return {
        "id": service.engine.target_name,
        "object": "model",
        "created": service.started_at,
        "owned_by": "driftguard",
        "max_model_len": service.engine.max_length,
    }


async def _tokenized(
    request: Request, service: Service, encode: Callable[[Any, PromptLimit, B], T], body: B
) -> T:
    """Raises ClientGone, at once for a request that waits for its turn; InvalidRequest."""

    async def work() -> T:
        async with service.tokenizing:
            return await run_in_threadpool(encode, service.engine.tokenizer, service.limit, body)

    return await unless_disconnected(request.receive, work())


async def _answer(
    request: Request,
    service: Service,
    body: CompletionBody | ChatBody,
    prompts: Sequence[list[int]],
    max_tokens: int,
) -> Response:
    is_chat = isinstance(body, ChatBody)
    response_id = f"{'chatcmpl' if is_chat else 'cmpl'}-{uuid4().hex}"
    head = ResponseHead(response_id, int(time.time()), service.engine.target_name, is_chat)
    params = sampling_params(body, max_tokens)
    requests = make_requests(response_id, prompts, body.n, params, request.headers)
    submission = service.runner.submit(requests)
    order = {one.request_id: index for index, one in enumerate(requests)}
    lengths = [len(prompt) for prompt in prompts]
    if body.stream:
        return EventStream(_events(submission, head, order, lengths, body), owner=submission)
    with submission:
        try:
            finished = await unless_disconnected(request.receive, _finished(submission, order))
        except ClientGone:
            return Response(status_code=CLIENT_CLOSED_REQUEST)
    return JSONResponse(whole_response(head, finished, usage_of(lengths, finished)))


async def _finished(submission: Submission, order: dict[str, int]) -> list[FinishedRequest]:
    finished: dict[int, FinishedRequest] = {}
    async for output in submission.outputs():
        if output.finished is not None:
            finished[order[output.request_id]] = _checked(output.finished)
    return [finished[index] for index in sorted(finished)]


def _checked(finished: FinishedRequest) -> FinishedRequest:
    """Raises GenerationFailed, EngineUnavailable for a request that did not end by itself."""
    if finished.finish_reason == "error":
        raise GenerationFailed(f"the engine failed on this request: {finished.error}")
    if finished.finish_reason == "abort":
        raise EngineUnavailable("the request was aborted: the server is shutting down")
    return finished


async def _events(
    submission: Submission,
    head: ResponseHead,
    order: dict[str, int],
    lengths: list[int],
    body: CompletionBody | ChatBody,
) -> AsyncIterator[bytes]:
    counts = [0] * len(order)  # output tokens of each choice so far
    finished: dict[int, FinishedRequest] = {}

    def with_usage(chunk: Json, index: int) -> Json:
        if body.has_usage_in_each_chunk:
            return chunk | {"usage": tokens_of(lengths[index // body.n], counts[index])}
        return chunk | {"usage": None} if body.includes_usage else chunk

    try:
        if head.is_chat:
            for index in range(len(order)):
                yield event(with_usage(first_chat_chunk(head, index), index))
        async for output in submission.outputs():
            index = order[output.request_id]
            counts[index] += len(output.token_ids)
            if chunk := _output_chunk(head, index, output, finished):
                yield event(with_usage(chunk, index))
    except EngineError as error:
        yield event(openai_error(error.status, error.detail, error.field, error.code))
        return
    if body.includes_usage:
        in_order = [finished[index] for index in sorted(finished)]
        yield event(usage_chunk(head, in_order, usage_of(lengths, in_order)))
    yield DONE


def _output_chunk(
    head: ResponseHead, index: int, output: RequestOutput, finished: dict[int, FinishedRequest]
) -> Json | None:
    reason = None
    if output.finished is not None:
        finished[index] = _checked(output.finished)
        reason = output.finished.finish_reason
    if not output.text and reason is None:
        return None
    return text_chunk(head, index, output.text, reason)
