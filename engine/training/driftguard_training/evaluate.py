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
from driftguard_training.serving import Expected, counts_of, ends_of
from driftguard_training.settings import AcceptanceRule, EvaluateSettings
from driftguard_training.teacher import output_logits
from driftguard_training.traffic import ServedRequest, read_traffic

_BATCH_REQUESTS = 8
_TIMED_REPEATS = 30
_TIMED_WARMUP = 5


def evaluate(settings: EvaluateSettings) -> dict[str, object]:
    """Acceptance and cost of every draft on the same requests.

    Per segment, "acceptance" is what records hold: accepted tokens per draft token at this K, as expected of
    a server that keeps drafts by this rule (see driftguard_training.serving); null where nothing is drafted,
    as for answers of one token. Of each request, in the order of the file: "drafted" and "accepted", of which
    that is the ratio of sums, and "kept", the mean acceptance probability of a single draft token at its
    output positions, which varies less from request to request. "steps" are those that make the segment's
    "positions" output tokens. Times are in seconds: medians of repeated calls with one request in flight.

    Raises:
        TrainingRefused: bad models or bad traffic.
    """
    target = load_model(settings.target, "target")
    drafts = [load_model(directory, "draft") for directory in settings.drafts]
    for draft in drafts:
        check_fit(target, draft)
    context = min(model.context_tokens for model in [target, *drafts])
    requests = read_traffic(settings.traffic, target.vocabulary, context)
    served = [
        ServedRequest(
            one.segment,
            one.prompt_token_ids,
            one.output_token_ids,
            settings.temperature,
            settings.num_speculative_tokens,
        )
        for one in requests
    ]
    scores = _scores(target, drafts, served, settings.acceptance_rule)
    return {
        "num_speculative_tokens": settings.num_speculative_tokens,
        "temperature": settings.temperature,
        "acceptance_rule": settings.acceptance_rule,
        "seconds_per_target_step": seconds_per_call(target.model, settings.num_speculative_tokens + 1),
        "drafts": [
            {
                "directory": str(draft.directory),
                "seconds_per_draft_token": seconds_per_call(draft.model, 1),
                "segments": _segments(served, of_draft),
            }
            for draft, of_draft in zip(drafts, scores, strict=True)
        ],
    }


class RequestScore(NamedTuple):
    """Of one request. `kept`: acceptance probability of a single draft token, mean over output positions."""

    kept: float
    counts: Expected


@torch.no_grad()
def _scores(
    target: LoadedModel,
    drafts: Sequence[LoadedModel],
    requests: Sequence[ServedRequest],
    rule: AcceptanceRule,
) -> list[list[RequestScore]]:
    """Per draft, per request."""
    found: list[list[RequestScore]] = [[] for _ in drafts]
    ends = ends_of(target)
    for start in range(0, len(requests), _BATCH_REQUESTS):
        batch = requests[start : start + _BATCH_REQUESTS]
        p = _distributions(target, batch)
        for draft, scores in zip(drafts, found, strict=True):
            q = _distributions(draft, batch, greedy=rule == "match")
            scores += [
                RequestScore(
                    acceptance_probability(of_p, of_q).mean().item(), counts_of(one, of_p, of_q, ends)
                )
                for one, of_p, of_q in zip(batch, p, q, strict=True)
            ]
    return found


def _distributions(
    model: LoadedModel, requests: Sequence[ServedRequest], *, greedy: bool = False
) -> list[torch.Tensor]:
    """What it draws from, of each request [outputs, V]."""
    return [
        distribution(logits, 0.0 if greedy else request.temperature)
        for request, logits in zip(requests, output_logits(model.model, requests), strict=True)
    ]


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


def _segments(requests: Sequence[ServedRequest], scores: Sequence[RequestScore]) -> list[dict[str, object]]:
    pairs = list(zip(requests, scores, strict=True))
    segments = sorted({request.segment for request in requests})
    return [
        {"segment": segment, **_segment([pair for pair in pairs if pair[0].segment == segment])}
        for segment in segments
    ]


def _segment(scored: Sequence[tuple[ServedRequest, RequestScore]]) -> dict[str, object]:
    counts = [score.counts for _, score in scored]
    drafted, accepted = [one.drafted for one in counts], [one.accepted for one in counts]
    return {
        "requests": len(scored),
        "positions": sum(len(request.output_token_ids) for request, _ in scored),
        "steps": sum(one.steps for one in counts),
        "acceptance": sum(accepted) / sum(drafted) if sum(drafted) else None,
        "kept": [score.kept for _, score in scored],
        "drafted": drafted,
        "accepted": accepted,
    }
