"""Times of forward passes with one request in flight, on a machine that may do other things as well."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from driftguard_engine.models.loading import context_of
from driftguard_engine.models.recurrent import cache_argument
from transformers import DynamicCache, PreTrainedModel

_TURNS = 20


@dataclass(frozen=True, slots=True)
class Timed:
    """A call that can be made `most` times, and what is to be known: its seconds for each of `tokens`."""

    call: Callable[[], object]
    most: int
    tokens: int = 1


@torch.no_grad()
def seconds_in_turns(timed: Sequence[Timed]) -> list[float]:
    """Of each, the least that a call took, on one thread or on those that torch has, whichever is quicker.

    What else the machine does makes calls longer only, and for a while: they take turns, so that it makes
    those of one no longer than those of another.

    Threads that do not spin while they wait, as those of this process, can take twice as long as one where a
    model is small; those of an engine spin.
    """
    given, least = torch.get_num_threads(), [math.inf] * len(timed)
    try:
        for threads in sorted({1, given}):
            torch.set_num_threads(threads)
            for turn in range(_TURNS):
                for number, one in enumerate(timed):
                    if turn < _calls_on(threads, given, one.most):
                        started = time.perf_counter()
                        one.call()
                        least[number] = min(least[number], time.perf_counter() - started)
    finally:
        torch.set_num_threads(given)
    return [seconds / one.tokens for seconds, one in zip(least, timed, strict=True)]


def _calls_on(threads: int, given: int, most: int) -> int:
    """Of at most `most` calls, those on so many threads: half of them on one, and a single one there."""
    if given == 1:
        return most
    return most // 2 if threads > 1 else most - most // 2


def timed_pass(model: PreTrainedModel, tokens_per_call: int) -> Timed:
    """A forward pass over `tokens_per_call` new tokens, or as many as the model's context has, continuing a
    short context."""
    cache = {cache_argument(model): DynamicCache(config=model.config)}
    context = context_of(model.config) or sys.maxsize
    count = min(tokens_per_call, context)
    tokens = torch.ones(1, count, dtype=torch.long)
    return Timed(lambda: model(input_ids=tokens, use_cache=True, **cache), context // count)
