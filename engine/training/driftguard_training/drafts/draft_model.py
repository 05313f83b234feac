"""A draft model, which reads tokens alone: what it drafts does not depend on where a step began.

As in the engine, a token that only the target has is read as token 0, and never drafted; nor is one that only
the draft has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

from driftguard_training.acceptance import distillation_loss
from driftguard_training.drafts.base import Draft
from driftguard_training.model_directories import LoadedModel, check_fit, load_model, save_model
from driftguard_training.settings import Loss
from driftguard_training.teacher import Teacher, Told, output_logits
from driftguard_training.timing import Timed, timed_pass
from driftguard_training.traffic import TrafficRequest


class DraftModel(Draft):
    """See `Draft`."""

    def __init__(self, directory: Path, target: LoadedModel) -> None:
        """Raises TrainingRefused: it cannot be loaded, or does not fit the target."""
        self._loaded = load_model(directory, "draft")
        check_fit(target, self._loaded)
        self.directory, self.module = directory, self._loaded.model
        self.context_tokens = self._loaded.context_tokens
        self._vocabulary = target.vocabulary
        self._teacher = Teacher(lambda requests: _probabilities(target, requests))

    def loss(self, requests: Sequence[TrafficRequest], loss: Loss) -> tuple[Tensor, Tensor]:
        p = torch.cat([told for (told,) in self._teacher.told(requests)]).float()  # [N, V], of N outputs
        logits = torch.cat(self._logits(requests))  # [N, of those that both have]
        return distillation_loss(p[:, : logits.shape[1]], logits, loss)

    def places(self, requests: Sequence[TrafficRequest], _told: Told, _k: int, /) -> Iterator[list[Tensor]]:
        missing = max(self._vocabulary - self._loaded.vocabulary, 0)
        yield [functional.pad(each, (0, missing), value=-torch.inf) for each in self._logits(requests)]

    def _logits(self, requests: Sequence[TrafficRequest]) -> list[Tensor]:
        """Per request, of the tokens that both have: [outputs, V]."""
        known = self._loaded.vocabulary
        if known < self._vocabulary:
            requests = [_read_as(request, known) for request in requests]
        return [each[:, : self._vocabulary] for each in output_logits(self._loaded.model, requests)]

    def timed(self) -> Timed:
        return timed_pass(self._loaded.model, 1)

    def save(self, output: Path, facts: Mapping[str, object]) -> str:
        one = self._loaded
        return save_model(output, one.model, one.tokenizer, one.dtype, facts)


def _read_as(request: TrafficRequest, known: int) -> TrafficRequest:
    """With token 0 for each that is not among the first `known` ones."""
    prompt, output = (
        [token if token < known else 0 for token in token_ids]
        for token_ids in (request.prompt_token_ids, request.output_token_ids)
    )
    return TrafficRequest(request.segment, prompt, output)


def _probabilities(target: LoadedModel, requests: Sequence[TrafficRequest]) -> list[tuple[Tensor]]:
    """Of each request [outputs, V] at temperature 1, in half precision."""
    return [(logits.softmax(-1).half(),) for logits in output_logits(target.model, requests)]
