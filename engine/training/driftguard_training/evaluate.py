"""Score drafts on logged target output by teacher forcing: no live traffic is needed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from driftguard_training.drafts.base import Draft
from driftguard_training.drafts.kinds import load_draft
from driftguard_training.model_directories import LoadedModel, load_model
from driftguard_training.serving import DraftedAnswer, Expected, add_drafts, ends_of
from driftguard_training.settings import AcceptanceRule, EvaluateSettings
from driftguard_training.teacher import read_answers
from driftguard_training.timing import seconds_in_turns, timed_pass
from driftguard_training.traffic import ServedRequest, read_fitting

_BATCH_REQUESTS = 8


def evaluate(settings: EvaluateSettings) -> dict[str, object]:
    """Acceptance and cost of every draft on the same requests.

    Per segment, "acceptance" is what records hold: accepted tokens per draft token at this K, as expected of
    a server that keeps drafts by this rule (see driftguard_training.serving); null where nothing is drafted,
    as for answers of one token. Of each request, in the order of the file: "drafted" and "accepted", of which
    that is the ratio of sums, and "kept", the mean acceptance probability of a single draft token, which
    varies less from request to request (see RequestScore). "steps" are those that make the segment's
    "positions" output tokens. "surprise" of each request, in nats per token, is about 0 where the answers are
    the target's own (see driftguard_training.serving). Times are in seconds, with one request in flight
    (see driftguard_training.timing).

    Requests that are longer than the context of the target or of any draft are scored for none, so that all
    drafts have the same ones; "left_out" counts them by segment.

    Raises:
        TrainingRefused: bad models or bad traffic, or no request that fits their context.
    """
    target = load_model(settings.target, "target")
    drafts = [load_draft(directory, target) for directory in settings.drafts]
    context = min(target.context_tokens, *(draft.context_tokens for draft in drafts))
    read = read_fitting(settings.traffic, target.vocabulary, context)
    served = [
        ServedRequest(
            one.segment,
            one.prompt_token_ids,
            one.output_token_ids,
            settings.temperature,
            settings.num_speculative_tokens,
            verification=settings.verification,
        )
        for one in read.requests
    ]
    scores = _scores(target, drafts, served, settings.acceptance_rule)
    step, *seconds = seconds_in_turns(
        [timed_pass(target.model, settings.num_speculative_tokens + 1), *(draft.timed() for draft in drafts)]
    )
    return {
        "num_speculative_tokens": settings.num_speculative_tokens,
        "temperature": settings.temperature,
        "acceptance_rule": settings.acceptance_rule,
        "verification": settings.verification,
        "left_out": read.left_out(),
        "surprise": [score.surprise for score in scores[0]],
        "seconds_per_target_step": step,
        "drafts": [
            {
                "directory": str(draft.directory),
                "seconds_per_draft_token": of_token,
                "segments": _segments(served, of_draft),
            }
            for draft, of_draft, of_token in zip(drafts, scores, seconds, strict=True)
        ],
    }


class RequestScore(NamedTuple):
    """Of one request. `kept`: acceptance probability of a single draft token, mean over output positions, and
    over the places of a chain where it depends on these. `surprise`: mean over its tokens."""

    kept: float
    counts: Expected
    surprise: float


@torch.no_grad()
def _scores(
    target: LoadedModel, drafts: Sequence[Draft], requests: Sequence[ServedRequest], rule: AcceptanceRule
) -> list[list[RequestScore]]:
    """Per draft, per request."""
    found: list[list[RequestScore]] = [[] for _ in drafts]
    ends = ends_of(target)
    features = {layer for draft in drafts for layer in draft.features}
    for start in range(0, len(requests), _BATCH_REQUESTS):
        batch = requests[start : start + _BATCH_REQUESTS]
        told = read_answers(target.model, batch, features)
        for draft, scores in zip(drafts, found, strict=True):
            answers = [DraftedAnswer(one, z, (rule,)) for one, z in zip(batch, told.logits, strict=True)]
            add_drafts(answers, draft, batch, told)
            for one, answer in zip(batch, answers, strict=True):
                surprise = answer.surprise() / len(one.output_token_ids)
                scores.append(RequestScore(answer.kept(rule), answer.counts(rule, ends), surprise))
    return found


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
