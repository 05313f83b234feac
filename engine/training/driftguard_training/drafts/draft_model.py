"""A draft model, which reads tokens alone: what it drafts does not depend on where a step began."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from driftguard_training.acceptance import distillation_loss
from driftguard_training.drafts.base import Draft
from driftguard_training.model_directories import LoadedModel, check_fit, load_model, save_model
from driftguard_training.settings import Loss
from driftguard_training.teacher import Teacher, Told, output_logits
from driftguard_training.timing import seconds_per_call
from driftguard_training.traffic import TrafficRequest


class DraftModel(Draft):
    """See `Draft`."""

    def __init__(self, directory: Path, target: LoadedModel) -> None:
        """Raises TrainingRefused: it cannot be loaded, or does not fit the target."""
        self._loaded = load_model(directory, "draft")
        check_fit(target, self._loaded)
        self.directory, self.module = directory, self._loaded.model
        self.context_tokens = self._loaded.context_tokens
        self._teacher = Teacher(lambda requests: _probabilities(target, requests))

    def loss(self, requests: Sequence[TrafficRequest], loss: Loss) -> tuple[Tensor, Tensor]:
        p = torch.cat([told for (told,) in self._teacher.told(requests)]).float()  # [N, V], of N outputs
        logits = torch.cat(output_logits(self._loaded.model, requests))  # [N, V]
        return distillation_loss(p, logits, loss)

    def places(self, requests: Sequence[TrafficRequest], _told: Told, _k: int, /) -> Iterator[list[Tensor]]:
        yield output_logits(self._loaded.model, requests)

    def seconds_per_token(self) -> float:
        return seconds_per_call(self._loaded.model, 1)

    def save(self, output: Path, facts: Mapping[str, object]) -> str:
        one = self._loaded
        return save_model(output, one.model, one.tokenizer, one.dtype, facts)


def _probabilities(target: LoadedModel, requests: Sequence[TrafficRequest]) -> list[tuple[Tensor]]:
    """Of each request [outputs, V] at temperature 1, in half precision."""
    return [(logits.softmax(-1).half(),) for logits in output_logits(target.model, requests)]
