"""Distil the draft in service on captured traffic, so that the target accepts more of its tokens."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from driftguard_training.drafts.base import Draft
from driftguard_training.drafts.kinds import load_draft
from driftguard_training.errors import TooLittleTraffic
from driftguard_training.model_directories import LoadedModel, check_output, load_model, model_version
from driftguard_training.pretraining import Schedule, adamw, apply_gradient
from driftguard_training.settings import DistillSettings
from driftguard_training.traffic import TrafficRequest, read_traffic

_WARMUP_STEPS = 10
_REPORT_EVERY_STEPS = 10

Emit = Callable[[dict[str, object]], None]


def distill(settings: DistillSettings, emit: Emit) -> None:
    """Write the candidate to `settings.output`; report progress, and at last "done", through `emit`.

    Only output positions count in the loss: prompt tokens are never drafted.

    Raises:
        TrainingRefused: bad models, bad or too little traffic, or an output that exists. Nothing is written.
    """
    started = time.monotonic()
    check_output(settings.output)
    target = load_model(settings.target, "target")
    draft = load_draft(settings.draft, target)
    train, replay = _read(settings, target, draft)
    acceptance = _optimise(settings, draft, batches(train, replay, settings, draft.replay_share), emit)
    facts: dict[str, object] = {
        "parent": model_version(settings.draft),
        "target": settings.target.name,
        "loss": settings.loss,
        "steps": settings.steps,
        "seed": settings.seed,
        "learning_rate": settings.learning_rate,
        "batch_requests": settings.batch_requests,
        "train_requests": len(train),
        "replay_requests": len(replay),
        "training_acceptance": acceptance,
    }
    version = draft.save(settings.output, facts)
    seconds = round(time.monotonic() - started, 3)
    emit({"event": "done", "output": str(settings.output), "version": version, "seconds": seconds, **facts})


def batches(
    train: Sequence[TrafficRequest], replay: Sequence[TrafficRequest], settings: DistillSettings, share: float
) -> Iterator[list[TrafficRequest]]:
    """Batches without end: shuffled passes over `train`; this share of each batch from `replay`, if given."""
    generator = random.Random(settings.seed)
    replayed = round(settings.batch_requests * share) if replay else 0
    fresh, older = _passes(train, generator), _passes(replay, generator)
    while True:
        batch = list(itertools.islice(fresh, settings.batch_requests - replayed))
        yield batch + list(itertools.islice(older, replayed))


def _passes(requests: Sequence[TrafficRequest], generator: random.Random) -> Iterator[TrafficRequest]:
    while requests:
        yield from generator.sample(requests, len(requests))


def _read(
    settings: DistillSettings, target: LoadedModel, draft: Draft
) -> tuple[list[TrafficRequest], list[TrafficRequest]]:
    context = min(target.context_tokens, draft.context_tokens)

    def read(path: Path) -> list[TrafficRequest]:
        requests = read_traffic(path, target.vocabulary, context)
        return [one for one in requests if len(one.token_ids) >= draft.least_tokens]

    train = read(settings.train)
    if len(train) < settings.minimum_requests:
        raise TooLittleTraffic(
            f"{settings.train} has {len(train)} requests; distillation needs at least "
            f"{settings.minimum_requests}, fewer can make a draft worse"
        )
    return train, read(settings.replay) if settings.replay else []


def _optimise(
    settings: DistillSettings, draft: Draft, data: Iterator[list[TrafficRequest]], emit: Emit
) -> float:
    """Train the draft in place; returns the mean acceptance probability of the last reported steps."""
    torch.manual_seed(settings.seed)  # for drafts with dropout
    optimizer = adamw(draft.module, weight_decay=0.0)
    schedule = Schedule(settings.steps, settings.learning_rate, _WARMUP_STEPS, final_share=0.0)
    draft.module.train()
    recent: list[float] = []
    for step, batch in zip(range(settings.steps), data, strict=False):
        loss, accepted = draft.loss(batch, settings.loss)
        apply_gradient(draft.module, optimizer, loss, schedule.at(step))
        recent = [*recent, accepted.mean().item()][-_REPORT_EVERY_STEPS:]
        if (step + 1) % _REPORT_EVERY_STEPS == 0 or step + 1 == settings.steps:
            emit(_progress(step + 1, settings.steps, loss.item(), recent))
    draft.module.eval()
    return round(sum(recent) / len(recent), 4)


def _progress(step: int, steps: int, loss: float, recent: list[float]) -> dict[str, object]:
    acceptance = round(sum(recent) / len(recent), 4)
    return {
        "event": "progress",
        "step": step,
        "steps": steps,
        "loss": round(loss, 4),
        "acceptance": acceptance,
    }
