"""Score drafts on logged target output by teacher forcing: no live traffic is needed."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch
from transformers import DynamicCache, PreTrainedModel

from driftguard_training.acceptance import acceptance_probability, distribution
from driftguard_training.model_directories import LoadedModel, check_fit, load_model
from driftguard_training.settings import EvaluateSettings
from driftguard_training.teacher import output_logits
from driftguard_training.traffic import TrafficRequest, read_traffic

_BATCH_REQUESTS = 8
_TIMED_REPEATS = 30
_TIMED_WARMUP = 5


def evaluate(settings: EvaluateSettings) -> dict[str, object]:
    """Acceptance and cost of every draft on the same requests.

    "acceptance" is what records hold: accepted tokens per draft token at this K, as expected. Per segment,
    "per_request" lists the mean acceptance probability of each request's positions, for every draft in the
    order of the file, so that a gate can compare them in pairs: it varies less from request to request than
    what records hold. Times are in seconds: medians of repeated calls with one request in flight.

    Raises:
        TrainingRefused: bad models or bad traffic.
    """
    target = load_model(settings.target, "target")
    drafts = [load_model(directory, "draft") for directory in settings.drafts]
    for draft in drafts:
        check_fit(target, draft)
    context = min(model.context_tokens for model in [target, *drafts])
    requests = read_traffic(settings.traffic, target.vocabulary, context)
    of_drafts = 0.0 if settings.acceptance_rule == "match" else settings.temperature
    accepted = acceptance_of_positions(target, drafts, requests, settings.temperature, of_drafts)
    return {
        "num_speculative_tokens": settings.num_speculative_tokens,
        "temperature": settings.temperature,
        "acceptance_rule": settings.acceptance_rule,
        "seconds_per_target_step": seconds_per_call(target.model, settings.num_speculative_tokens + 1),
        "drafts": [
            {
                "directory": str(draft.directory),
                "seconds_per_draft_token": seconds_per_call(draft.model, 1),
                "segments": _segments(requests, rates, settings.num_speculative_tokens),
            }
            for draft, rates in zip(drafts, accepted, strict=True)
        ],
    }


@torch.no_grad()
def acceptance_of_positions(
    target: LoadedModel,
    drafts: Sequence[LoadedModel],
    requests: Sequence[TrafficRequest],
    temperature: float,
    draft_temperature: float,
) -> list[list[torch.Tensor]]:
    """Per draft, per request: acceptance probability of every output position, [outputs].

    `draft_temperature`: 0 where the likeliest token is drafted, whatever the target's temperature.
    """
    accepted: list[list[torch.Tensor]] = [[] for _ in drafts]
    for start in range(0, len(requests), _BATCH_REQUESTS):
        batch = requests[start : start + _BATCH_REQUESTS]
        p = [distribution(logits, temperature) for logits in output_logits(target.model, batch)]
        for draft, rates in zip(drafts, accepted, strict=True):
            q = [distribution(logits, draft_temperature) for logits in output_logits(draft.model, batch)]
            rates += [acceptance_probability(*pair) for pair in zip(p, q, strict=True)]
    return accepted


class ExpectedCounts(NamedTuple):
    """Of one answer: verification steps, draft tokens, and those accepted."""

    steps: float
    drafted: float
    accepted: float


def expected_counts(rates: Sequence[float], num_speculative_tokens: int) -> ExpectedCounts:
    """What it takes to emit len(rates) tokens, at least one, given the acceptance of each position.

    A step that starts at position t accepts k < K tokens and emits k + 1 with probability
    a_t ... a_{t+k-1} (1 - a_{t+k}), or K + 1 with probability a_t ... a_{t+K-1}. starts[t] is the
    probability that some step starts at t; the expected number of steps is their sum. Drafts beyond the
    end of the output are not counted, as in the engine.
    """
    starts = [1.0] + [0.0] * len(rates)
    drafted = accepted = 0.0
    for position in range(len(rates)):
        survives = starts[position]
        drafted += survives * min(num_speculative_tokens, len(rates) - position)
        for offset in range(num_speculative_tokens):
            if position + offset >= len(rates):
                break
            rate = rates[position + offset]
            starts[position + offset + 1] += survives * (1 - rate)
            survives *= rate
            accepted += survives
        else:
            starts[min(position + num_speculative_tokens + 1, len(rates))] += survives
    return ExpectedCounts(sum(starts[: len(rates)]), drafted, accepted)


@torch.no_grad()
def seconds_per_call(model: PreTrainedModel, tokens_per_call: int) -> float:
    """Median seconds of one forward pass over `tokens_per_call` new tokens, continuing a short context."""
    cache = DynamicCache(config=model.config)
    tokens = torch.ones(1, tokens_per_call, dtype=torch.long)
    fits = model.config.max_position_embeddings // tokens_per_call
    seconds = []
    for _ in range(min(_TIMED_WARMUP + _TIMED_REPEATS, fits)):
        started = time.perf_counter()
        model(input_ids=tokens, past_key_values=cache, use_cache=True)
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds[_TIMED_WARMUP:] or seconds)


def _segments(
    requests: Sequence[TrafficRequest], rates: Sequence[torch.Tensor], num_speculative_tokens: int
) -> list[dict[str, object]]:
    segments = sorted({request.segment for request in requests})
    return [
        {
            "segment": segment,
            **_segment(
                [r for request, r in zip(requests, rates, strict=True) if request.segment == segment],
                num_speculative_tokens,
            ),
        }
        for segment in segments
    ]


def _segment(rates: Sequence[torch.Tensor], num_speculative_tokens: int) -> dict[str, object]:
    positions = sum(len(rate) for rate in rates)
    counts = [expected_counts(rate.tolist(), num_speculative_tokens) for rate in rates]
    return {
        "requests": len(rates),
        "positions": positions,
        "acceptance": sum(one.accepted for one in counts) / sum(one.drafted for one in counts),
        "expected_emitted_per_step": positions / sum(one.steps for one in counts),
        "per_request": [rate.mean().item() for rate in rates],
    }
