"""An EAGLE-3 head, trained and scored in chains of drafts as the engine makes them: the first draft of a step
reads the target's hidden states, each further one what the head gave for the one before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from driftguard_engine.core import InvalidModel
from driftguard_engine.kv_cache import Span
from driftguard_engine.models.eagle3 import Eagle3Model
from driftguard_engine.models.eagle3_head import read_head
from torch import Tensor
from torch.nn import functional

from driftguard_training.drafts.base import Draft
from driftguard_training.eagle3 import PASSES, chain_loss, chains, save_trained_head
from driftguard_training.errors import BadModelDirectory
from driftguard_training.model_directories import LoadedModel
from driftguard_training.settings import Loss
from driftguard_training.teacher import Told, read_answers
from driftguard_training.timing import median_seconds
from driftguard_training.traffic import TrafficRequest

_TIMED_ROOM = 64  # positions


class Eagle3Draft(Draft):
    """See `Draft`. An embedding of its own stays as it is, as in speculators.

    A step behind a prompt of one token drafts nothing: the target has read no token yet.
    """

    least_tokens = 3

    def __init__(self, directory: Path, target: LoadedModel) -> None:
        """Raises TrainingRefused: it cannot be read, or does not fit the target."""
        config = target.model.config.get_text_config()
        embedding = cast("Any", target.model).get_input_embeddings().weight.detach()
        try:
            self._head, self._token_ids = read_head(
                directory, config.num_hidden_layers, embedding, target.vocabulary, field="draft"
            )
        except InvalidModel as error:
            raise BadModelDirectory(error.detail) from None
        self._head.requires_grad_(True)
        self._embedding = embedding
        if self._head.embed_tokens is not None:
            self._embedding = self._head.embed_tokens.requires_grad_(False).weight
        self._target = target
        self.directory, self.module = directory, self._head
        self.context_tokens = int(self._head.config.layer.max_position_embeddings)
        self.features = self._head.config.features

    def loss(self, requests: Sequence[TrafficRequest], loss: Loss) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            told = read_answers(self._target.model, requests, self.features)
            p, counted = self._answers(requests, told)
        passes = min(PASSES, told.token_ids.shape[1] - 1)
        total, accepted = chain_loss(p, counted, self._chains(told, passes), loss)
        return total, torch.cat(accepted)

    def _answers(self, requests: Sequence[TrafficRequest], told: Told) -> tuple[Tensor, Tensor]:
        """The target's probabilities of the head's tokens [R, L, D], and which tokens are of answers
        [R, L + 1]."""
        rows, longest = told.token_ids.shape
        p = torch.zeros(rows, longest, len(self._token_ids))
        counted = torch.zeros(rows, longest + 1, dtype=torch.bool)
        for row, (request, logits) in enumerate(zip(requests, told.logits, strict=True)):
            first, end = len(request.prompt_token_ids), len(request.token_ids)
            p[row, first - 1 : end - 1] = logits.softmax(-1)[:, self._token_ids]
            counted[row, first:end] = True
        return p, counted

    def _chains(self, told: Told, passes: int) -> Iterator[Tensor]:
        features = torch.cat([told.states[layer] for layer in self.features], -1)
        return chains(self._head, features, functional.embedding(told.token_ids, self._embedding), passes)

    def places(self, requests: Sequence[TrafficRequest], told: Told, k: int) -> Iterator[list[Tensor]]:
        passes = min(k, told.token_ids.shape[1] - 1)  # place i drafts token i + 2 in the first one
        for step, logits in enumerate(self._chains(told, passes)):
            yield [
                self._spread(
                    logits[row, max(0, len(one.prompt_token_ids) - 2) : max(0, len(one.token_ids) - 2 - step)]
                )
                for row, one in enumerate(requests)
            ]

    def _spread(self, logits: Tensor) -> Tensor:
        """[n, D] -> [n, V]: a token that the head has not is never drafted."""
        spread = logits.new_full((len(logits), self._target.vocabulary), -torch.inf)
        return spread.index_copy_(1, self._token_ids, logits)

    def seconds_per_token(self) -> float:
        """Of one pass of the engine's own head."""
        model = Eagle3Model(
            self._head, self._token_ids, self._embedding, self._target.vocabulary, 1, _TIMED_ROOM
        )
        places = iter(range(_TIMED_ROOM))
        hidden = torch.zeros(1, self._head.config.layer.hidden_size)
        return median_seconds(
            lambda: model.predict(model.read([1], [Span(0, next(places), 1)], hidden)), _TIMED_ROOM
        )

    def save(self, output: Path, facts: Mapping[str, object]) -> str:
        return save_trained_head(output, self.directory, self._head, {**facts, "passes": PASSES})
