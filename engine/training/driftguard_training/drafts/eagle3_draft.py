"""An EAGLE-3 head, trained and scored in chains of drafts as the engine makes them: the first draft of a step
reads the target's hidden states, each further one what the head gave for the one before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from driftguard_engine.core import InvalidModel
from driftguard_engine.kv_cache import Span
from driftguard_engine.models.chain_heads import Eagle3Model
from driftguard_engine.models.eagle3_head import read_head
from driftguard_engine.models.speculators import TargetSizes
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from driftguard_training.acceptance import chain_loss
from driftguard_training.drafts.base import Draft
from driftguard_training.errors import BadModelDirectory
from driftguard_training.heads import PASSES, save_trained_head
from driftguard_training.model_directories import LoadedModel
from driftguard_training.passes import chains
from driftguard_training.settings import Loss
from driftguard_training.teacher import Teacher, Told, read_answers
from driftguard_training.timing import Timed
from driftguard_training.traffic import TrafficRequest

_TIMED_ROOM = 64  # positions


class Eagle3Draft(Draft):
    """See `Draft`. An embedding of its own stays as it is, as in speculators; so does what is the target's.

    A step behind a prompt of one token drafts nothing: the target has read no token yet.
    """

    # With a quarter the bundled head lost up to .024 of what it kept of older traffic, with a half .006.
    replay_share = 0.5
    least_tokens = 3

    def __init__(self, directory: Path, target: LoadedModel) -> None:
        """Raises TrainingRefused: it cannot be read, or does not fit the target."""
        config = target.model.config.get_text_config()
        embedding = cast("Any", target.model).get_input_embeddings().weight.detach()
        try:
            sizes = TargetSizes(target.vocabulary, config.num_hidden_layers, config.hidden_size, embedding)
            self._head, self._token_ids = read_head(directory, sizes, field="draft")
        except InvalidModel as error:
            raise BadModelDirectory(error.detail) from None
        self._head.requires_grad_(True)
        self._embedding = embedding
        if self._head.embed_tokens is not None:
            self._embedding = self._head.embed_tokens.requires_grad_(False).weight
        target.model.requires_grad_(False)  # of its output layer gradients would be computed otherwise
        self._target, self._unembed = target, cast("Any", target.model).get_output_embeddings()
        self._teacher = Teacher(self._told)
        self.directory, self.module = directory, self._head
        self.context_tokens = (
            target.context_tokens
        )  # the engine drafts behind the positions it was trained on
        self.features = self._head.config.features

    def loss(self, requests: Sequence[TrafficRequest], loss: Loss) -> tuple[Tensor, Tensor]:
        told = self._teacher.told(requests)
        features = pad_sequence([each for _, each in told], batch_first=True)
        rows, longest = features.shape[:2]
        token_ids = torch.zeros(rows, longest, dtype=torch.long)
        p = torch.zeros(rows, longest, len(self._token_ids))
        counted = torch.zeros(rows, longest + 1, dtype=torch.bool)  # see chain_loss
        for row, (request, (of_answer, _)) in enumerate(zip(requests, told, strict=True)):
            first, end = len(request.prompt_token_ids), len(request.token_ids)
            token_ids[row, :end] = torch.tensor(request.token_ids)
            p[row, first - 1 : end - 1] = of_answer
            counted[row, first:end] = True
        total, accepted = chain_loss(p, counted, self._chains(features, token_ids, PASSES), loss)
        return total, torch.cat(accepted)

    def _told(self, requests: Sequence[TrafficRequest]) -> list[tuple[Tensor, Tensor]]:
        """Of each request the target's probabilities of the head's tokens at temperature 1 [outputs, D], in
        half precision, and the features of all its tokens [L, F]."""
        told = read_answers(self._target.model, requests, self.features)
        features = self._side_by_side(told)
        return [
            (logits.softmax(-1)[:, self._token_ids].half(), features[row, : len(request.token_ids)].clone())
            for row, (request, logits) in enumerate(zip(requests, told.logits, strict=True))
        ]

    def _side_by_side(self, told: Told) -> Tensor:
        """[R, L, F]"""
        return torch.cat([told.states[layer] for layer in self.features], -1)

    def _chains(self, features: Tensor, token_ids: Tensor, passes: int) -> Iterator[Tensor]:
        """As many passes as there are drafts for in the longest sequence."""
        passes = min(passes, token_ids.shape[1] - 1)
        return chains(self._head, features, self._embedding, token_ids, passes, self._unembed)

    def places(self, requests: Sequence[TrafficRequest], told: Told, k: int) -> Iterator[list[Tensor]]:
        for step, logits in enumerate(self._chains(self._side_by_side(told), told.token_ids, k)):
            yield [self._spread(logits[row, _places_of(one, step)]) for row, one in enumerate(requests)]

    def _spread(self, logits: Tensor) -> Tensor:
        """[n, D] -> [n, V]: a token that the head has not is never drafted."""
        spread = logits.new_full((len(logits), self._target.vocabulary), -torch.inf)
        return spread.index_copy_(1, self._token_ids, logits)

    def timed(self) -> Timed:
        """A pass of the engine's own head."""
        ends = self._embedding, self._unembed, self._target.vocabulary
        model = Eagle3Model(self._head, self._token_ids, *ends, 1, _TIMED_ROOM)
        places = iter(range(_TIMED_ROOM))
        hidden = torch.zeros(1, self._head.config.layer.hidden_size)
        return Timed(lambda: model.predict(model.read([1], [Span(0, next(places), 1)], hidden)), _TIMED_ROOM)

    def save(self, output: Path, facts: Mapping[str, object]) -> str:
        return save_trained_head(output, self.directory, self._head, {**facts, "passes": PASSES})


def _places_of(request: TrafficRequest, step: int) -> slice:
    """Where the chains begin whose draft of this pass is a token of the answer: place i drafts token i + 2 in
    the first pass."""
    first = max(0, len(request.prompt_token_ids) - 2)
    return slice(first, max(first, len(request.token_ids) - 2 - step))
