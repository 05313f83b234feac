"""Medusa heads, trained and scored as the engine drafts with them: each reads the target's last hidden state
before the newest token, and their likeliest tokens make a tree."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from driftguard_engine.core import InvalidModel
from driftguard_engine.models.directory import weight_files
from driftguard_engine.models.medusa_head import read_heads
from safetensors.torch import load_file
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from driftguard_training.acceptance import chain_loss
from driftguard_training.drafts.base import Draft
from driftguard_training.errors import BadModelDirectory
from driftguard_training.medusa import head_logits, save_heads
from driftguard_training.model_directories import LoadedModel
from driftguard_training.settings import Loss
from driftguard_training.teacher import Teacher, Told, read_answers
from driftguard_training.timing import Timed
from driftguard_training.traffic import TrafficRequest


class MedusaDraft(Draft):
    """See `Draft`. The shape of the tree stays as it is.

    A step behind a prompt of one token drafts nothing: the target has read no token yet.
    """

    replay_share = 0.5  # as of an EAGLE-3 head
    least_tokens = 3

    def __init__(self, directory: Path, target: LoadedModel) -> None:
        """Raises TrainingRefused: it cannot be read, or does not fit the target."""
        embedding = cast("Any", target.model).get_input_embeddings().weight.detach()
        try:
            self._heads = read_heads(directory, embedding, target.vocabulary, field="draft")
        except InvalidModel as error:
            raise BadModelDirectory(error.detail) from None
        self._heads.requires_grad_(True)
        self._width = embedding.shape[1]
        self._target, self._teacher = target, Teacher(self._told)
        self.directory, self.module = directory, self._heads
        self.context_tokens = target.context_tokens
        self.features = (target.model.config.get_text_config().num_hidden_layers,)
        self.tree = frozenset(self._heads.config.choices)

    def loss(self, requests: Sequence[TrafficRequest], loss: Loss) -> tuple[Tensor, Tensor]:
        told = self._teacher.told(requests)
        states = pad_sequence([each for _, each in told], batch_first=True)  # [R, L, H]
        rows, longest = states.shape[:2]
        p = torch.zeros(rows, longest, self._target.vocabulary)
        counted = torch.zeros(rows, longest + 1, dtype=torch.bool)  # see chain_loss
        for row, (request, (of_answer, _)) in enumerate(zip(requests, told, strict=True)):
            first, end = len(request.prompt_token_ids), len(request.token_ids)
            p[row, first - 1 : end - 1] = of_answer
            counted[row, first:end] = True
        drafted = head_logits(self._heads, self._target.model, states[:, :-1])
        total, accepted = chain_loss(p, counted, drafted, loss)
        return total, torch.cat(accepted)

    def _told(self, requests: Sequence[TrafficRequest]) -> list[tuple[Tensor, Tensor]]:
        """Of each request the target's probabilities at temperature 1 [outputs, V], in half precision, and
        the last hidden states of all its tokens [L, H]."""
        told = read_answers(self._target.model, requests, self.features)
        states = told.states[self.features[0]]
        return [
            (logits.softmax(-1).half(), states[row, : len(request.token_ids)].clone())
            for row, (request, logits) in enumerate(zip(requests, told.logits, strict=True))
        ]

    def places(self, requests: Sequence[TrafficRequest], told: Told, k: int, /) -> Iterator[list[Tensor]]:
        states = told.states[self.features[0]]
        for step, logits in zip(range(k), head_logits(self._heads, self._target.model, states), strict=False):
            yield [logits[row, _places_of(one, step)] for row, one in enumerate(requests)]

    def timed(self) -> Timed:
        """All heads, for each token of the deepest path."""
        state = torch.zeros(1, 1, self._width)

        def draft() -> None:
            for logits in head_logits(self._heads, self._target.model, state):
                logits.topk(1)

        return Timed(draft, sys.maxsize, tokens=len(self._heads))

    def save(self, output: Path, facts: Mapping[str, object]) -> str:
        weights = [load_file(path) for path in weight_files(self.directory)]
        dtypes = {name: each.dtype for file in weights for name, each in file.items()}
        config = json.loads((self.directory / "config.json").read_text(encoding="utf-8"))
        return save_heads(output, self._heads, self._heads.config.choices, dtypes, facts, config)


def _places_of(request: TrafficRequest, step: int) -> slice:
    """Where what head `step` drafts is a token of the answer: place i drafts token i + 2 + step."""
    first = max(0, len(request.prompt_token_ids) - 2)
    return slice(first, max(first, len(request.token_ids) - 2 - step))
