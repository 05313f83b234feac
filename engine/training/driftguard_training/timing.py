"""Times of forward passes: medians of repeated calls, with one request in flight."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from driftguard_engine.models.loading import context_of
from driftguard_engine.models.recurrent import cache_argument
from transformers import DynamicCache, PreTrainedModel

_REPEATS = 15
_WARMUP = 5


def median_seconds(call: Callable[[], object], most: int) -> float:
    """Of one call, of at most `most`, on one thread or on those that torch has, whichever is quicker.

    Threads that do not spin while they wait, as those of this process, can take twice as long as one where a
    model is small; those of an engine spin.
    """
    given = torch.get_num_threads()
    counts = sorted({1, given})[:most]
    try:
        return min(_median_seconds(call, threads, most // len(counts)) for threads in counts)
    finally:
        torch.set_num_threads(given)


def _median_seconds(call: Callable[[], object], threads: int, most: int) -> float:
    torch.set_num_threads(threads)
    seconds = []
    for _ in range(min(_WARMUP + _REPEATS, most)):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[_WARMUP:] or seconds)


@torch.no_grad()
def seconds_per_call(model: PreTrainedModel, tokens_per_call: int) -> float:
    """Of one forward pass over `tokens_per_call` new tokens, or as many as the model's context has,
    continuing a short context."""
    cache = {cache_argument(model): DynamicCache(config=model.config)}
    context = context_of(model.config) or sys.maxsize
    count = min(tokens_per_call, context)
    tokens = torch.ones(1, count, dtype=torch.long)
    return median_seconds(lambda: model(input_ids=tokens, use_cache=True, **cache), context // count)
