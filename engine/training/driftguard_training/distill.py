"""Distil the draft in service on captured traffic, so that the target accepts more of its tokens."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from driftguard_training.drafts.base import Draft
from driftguard_training.drafts.kinds import load_draft
from driftguard_training.errors import TooLittleTraffic, TrainingDiverged
from driftguard_training.model_directories import LoadedModel, check_output, load_model, model_version
from driftguard_training.pretraining import Schedule, adamw, apply_gradient
from driftguard_training.settings import DistillSettings
from driftguard_training.traffic import TrafficRequest, read_fitting

_WARMUP_STEPS = 10
_REPORT_EVERY_STEPS = 10
_HELD_OUT_MEASUREMENTS = 10  # and one before the first step
_HELD_OUT_REQUESTS = 32

Emit = Callable[[dict[str, object]], None]


def distill(settings: DistillSettings, emit: Emit) -> None:
    """Write the candidate to `settings.output`; report progress, and at last "done", through `emit`.

    Only output positions count in the loss: prompt tokens are never drafted. Held-out traffic is only
    measured: the candidate is the same without it. Requests that are longer than the models' context are left
    out; "left_out_requests" says how many of `settings.train` and `settings.replay`.

    Raises:
        TrainingRefused: bad models, bad or too little traffic that fits their context, an output that exists,
            or a loss that is not finite. Nothing is written.
    """
    started = time.monotonic()
    check_output(settings.output)
    target = load_model(settings.target, "target")
    draft = load_draft(settings.draft, target)
    read = _read(settings, target, draft)
    data = batches(read.train, read.replay, settings, draft.replay_share)
    acceptance = _optimise(settings, draft, data, read.measured, emit)
    facts: dict[str, object] = {
        "parent": model_version(settings.draft),
        "target": settings.target.name,
        "loss": settings.loss,
        "steps": settings.steps,
        "seed": settings.seed,
        "learning_rate": settings.learning_rate,
        "batch_requests": settings.batch_requests,
        "train_requests": len(read.train),
        "replay_requests": len(read.replay),
        "left_out_requests": read.left_out,
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


class _Read(NamedTuple):
    """What is trained on, what is replayed, and what is measured; and how many requests of the first two are
    left out because they are longer than the models' context."""

    train: list[TrafficRequest]
    replay: list[TrafficRequest]
    measured: list[TrafficRequest]
    left_out: int


def _read(settings: DistillSettings, target: LoadedModel, draft: Draft) -> _Read:
    context = min(target.context_tokens, draft.context_tokens)

    def read(path: Path | None, *, may_be_none: bool = False) -> tuple[list[TrafficRequest], int]:
        if path is None:
            return [], 0
        found = read_fitting(path, target.vocabulary, context, may_be_none=may_be_none)
        drafted = [one for one in found.requests if len(one.token_ids) >= draft.least_tokens]
        return drafted, len(found.longer)

    (train, too_long), (held_out, _) = read(settings.train), read(settings.held_out)
    if len(train) < settings.minimum_requests:
        left_out = (
            f" (left out because they are longer than the models' context of {context} tokens: {too_long})"
        )
        raise TooLittleTraffic(
            f"{settings.train} has {len(train)} requests; distillation needs at least "
            f"{settings.minimum_requests}, fewer can make a draft worse{left_out if too_long else ''}"
        )
    replay, too_long_replay = read(settings.replay, may_be_none=True)
    measured = random.Random(settings.seed).sample(held_out, min(_HELD_OUT_REQUESTS, len(held_out)))
    return _Read(train, replay, measured, too_long + too_long_replay)


def _optimise(
    settings: DistillSettings,
    draft: Draft,
    data: Iterator[list[TrafficRequest]],
    held_out: Sequence[TrafficRequest],
    emit: Emit,
) -> float:
    """Train the draft in place; returns the mean acceptance probability of the last reported steps."""
    torch.manual_seed(settings.seed)  # for drafts with dropout
    optimizer = adamw(draft.module, weight_decay=0.0)
    schedule = Schedule(settings.steps, settings.learning_rate, _WARMUP_STEPS, final_share=0.0)
    between = math.ceil(settings.steps / _HELD_OUT_MEASUREMENTS)
    recent: list[float] = []

    def report(event: str, step: int, loss: float, acceptance: float) -> None:
        if not math.isfinite(loss):
            raise TrainingDiverged(f"the loss is {loss} at step {step}: the training diverged")
        told = {"loss": round(loss, 4), "acceptance": round(acceptance, 4)}
        emit({"event": event, "step": step, "steps": settings.steps, **told})

    if held_out:
        report("held_out", 0, *_measure(settings, draft, held_out))
    for step, batch in zip(range(1, settings.steps + 1), data, strict=False):
        draft.module.train()
        loss, accepted = draft.loss(batch, settings.loss)
        apply_gradient(draft.module, optimizer, loss, schedule.at(step - 1))
        recent = [*recent, accepted.mean().item()][-_REPORT_EVERY_STEPS:]
        if step % _REPORT_EVERY_STEPS == 0 or step == settings.steps:
            report("progress", step, loss.item(), sum(recent) / len(recent))
        if held_out and (step % between == 0 or step == settings.steps):
            report("held_out", step, *_measure(settings, draft, held_out))
    draft.module.eval()
    return round(sum(recent) / len(recent), 4)


@torch.no_grad()
def _measure(
    settings: DistillSettings, draft: Draft, requests: Sequence[TrafficRequest]
) -> tuple[float, float]:
    """Mean loss and mean acceptance probability of the tokens of these answers."""
    draft.module.eval()
    losses, kept, tokens = 0.0, 0.0, 0
    for start in range(0, len(requests), settings.batch_requests):
        batch = requests[start : start + settings.batch_requests]
        loss, accepted = draft.loss(batch, settings.loss)
        losses += loss.item() * len(accepted)
        kept += accepted.sum().item()
        tokens += len(accepted)
    return losses / tokens, kept / tokens
