"""Requests that all decode at once for a number of steps, and how fast."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime

import torch
from driftguard_engine.core import FinishedRequest, Request, RequestOutput, SamplingParams, SpeculationCounts
from driftguard_engine.engine import Engine

from tests.gpu.check.rows import Served

_STEPS_TO_START = 40  # at most, for prompts to be read
SETTLING_STEPS = 6


class ServingFailed(RuntimeError):
    """{why}: an engine did not serve as it should, so that nothing was measured."""


@dataclass(frozen=True, slots=True)
class Load:
    """batch requests at once. drafts: K; None: the engine's own choice."""

    batch: int
    drafts: int | None
    prompt_tokens: int
    temperature: float = 1.0


def serve(engine: Engine, load: Load, steps: int, seed: int = 0, settling: int = SETTLING_STEPS) -> Served:
    """As many steps as fit into the requests' length at a time, until there were `steps`.

    Raises ServingFailed.
    """
    seconds, done, tokens, contexts = 0.0, 0, 0, 0.0
    ended: list[FinishedRequest] = []
    while done < steps:
        with decoding(engine, load, seed + len(ended), settling, ended) as room:
            window = min(room, steps - done)
            begin = time.perf_counter()
            outputs = [engine.step() for _ in range(window)]
            seconds += time.perf_counter() - begin
        done += window
        tokens += sum(len(each.token_ids) for step in outputs for each in _unbroken(step))
        lengths = [load.prompt_tokens + len(each.output_token_ids) for each in ended[-load.batch :]]
        contexts += window * sum(lengths) / len(lengths)
    accepted, tested = (
        sum(counted) for counted in zip(*(judged(each.counts) for each in ended), strict=True)
    )
    # From the prompt to the end the sequence grows evenly.
    context = (load.prompt_tokens + contexts / done) / 2
    return Served(seconds, done, tokens, accepted, tested, context)


@contextmanager
def decoding(
    engine: Engine, load: Load, seed: int, settling: int, ended: list[FinishedRequest]
) -> Iterator[int]:
    """Inside it all requests of the load decode, for as many steps as it says; then they are aborted."""
    names = [f"{seed}-{row}" for row in range(load.batch)]
    for row, name in enumerate(names):
        engine.submit(_request(engine, load, name, seed * 1000 + row))
    begun: set[str] = set()
    early = 0
    while begun != set(names):
        begun |= {output.request_id for output in _unbroken(engine.step())}
        early += 1
        if early > _STEPS_TO_START:
            raise ServingFailed(f"{len(names) - len(begun)} requests gave nothing in {early} steps")
    for _ in range(settling):
        _unbroken(engine.step())
    per_step = 1 + (engine.config.max_speculative_tokens if load.drafts is None else load.drafts)
    room = (engine.max_length - load.prompt_tokens) // per_step - early - settling - 2
    if room < 1:
        raise ServingFailed(f"no step of K = {load.drafts} fits into {engine.max_length} tokens")
    last: list[RequestOutput] = []
    try:
        yield room
    finally:
        for name in names:
            engine.abort(name)
        last += engine.step()
    for output in last:
        if output.finished is not None and output.finished.finish_reason != "abort":
            raise ServingFailed(_reason(output.finished))
        ended += [output.finished] if output.finished is not None else []
    if engine.has_work():
        raise ServingFailed("requests did not end when they were aborted")


def judged(counts: SpeculationCounts) -> tuple[int, int]:
    """Drafts accepted, and drafts accepted or rejected; exact where all steps draft alike."""
    reached = [counts.steps, *counts.accepted_per_position][: len(counts.drafted_per_position)]
    tested = sum(map(min, reached, counts.drafted_per_position))
    return counts.accepted, tested


def _request(engine: Engine, load: Load, name: str, seed: int) -> Request:
    random = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, len(engine.tokenizer), (load.prompt_tokens,), generator=random).tolist()
    params = SamplingParams(
        max_tokens=engine.max_length,
        temperature=load.temperature,
        seed=seed,
        num_speculative_tokens=load.drafts,
        ignore_eos=True,
    )
    return Request(name, tuple(prompt), params, datetime.now(UTC))


def _unbroken(outputs: list[RequestOutput]) -> list[RequestOutput]:
    for output in outputs:
        if output.finished is not None:
            raise ServingFailed(_reason(output.finished))
    return outputs


def _reason(finished: FinishedRequest) -> str:
    return f"a request ended while it was measured: {finished.error or finished.finish_reason}"
