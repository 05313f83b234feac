"""What target and draft give for logged requests, by teacher forcing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from driftguard_training.traffic import TrafficRequest

_CACHE_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Told:
    """What a model gave for R requests of up to L tokens.

    token_ids [R, L], padded on the right. logits: of each request [outputs, V], those that predict its
    answer. states [R, L, H]: hidden states by layer, as `driftguard_engine.models.base.Features` counts them.
    """

    token_ids: Tensor
    logits: list[Tensor]
    states: Mapping[int, Tensor]


def read_answers(
    model: PreTrainedModel, requests: Sequence[TrafficRequest], layers: Collection[int] = ()
) -> Told:
    """With the hidden states of these layers.

    In a causal model no position attends to the padding behind it.
    """
    longest = max(len(request.token_ids) for request in requests)
    tokens = torch.zeros(len(requests), longest, dtype=torch.long)  # [R, L]
    for row, request in enumerate(requests):
        tokens[row, : len(request.token_ids)] = torch.tensor(request.token_ids)
    first = min(len(request.prompt_token_ids) for request in requests) - 1  # nothing before it is needed
    output = model(
        input_ids=tokens,
        use_cache=False,
        logits_to_keep=longest - first,
        output_hidden_states=bool(layers),
    )
    logits = output.logits.float()  # [R, L - first, V]
    of_answers = [
        logits[row, len(request.prompt_token_ids) - 1 - first : len(request.token_ids) - 1 - first]
        for row, request in enumerate(requests)
    ]
    return Told(tokens, of_answers, {layer: output.hidden_states[layer] for layer in layers})


def output_logits(model: PreTrainedModel, requests: Sequence[TrafficRequest]) -> list[Tensor]:
    """Per request the logits [outputs, V] that predict each of its output tokens."""
    return read_answers(model, requests).logits


class Teacher:
    """What the target tells about logged requests, for training.

    The target never changes during distillation, so each request is forwarded once and kept, up to 1 GiB;
    beyond that it is forwarded again each time.
    """

    def __init__(self, ask: Callable[[Sequence[TrafficRequest]], Sequence[tuple[Tensor, ...]]]) -> None:
        """ask: gives the tensors to be kept of each request."""
        self._ask = ask
        self._kept: dict[int, tuple[Tensor, ...]] = {}
        self._kept_bytes = 0

    @torch.no_grad()
    def told(self, requests: Sequence[TrafficRequest]) -> list[tuple[Tensor, ...]]:
        """Per request."""
        missing = [request for request in requests if id(request) not in self._kept]
        fresh = dict(zip(map(id, missing), self._ask(missing) if missing else (), strict=True))
        for key, tensors in fresh.items():
            size = sum(each.nbytes for each in tensors)
            if self._kept_bytes + size <= _CACHE_BYTES:
                self._kept[key] = tensors
                self._kept_bytes += size
        return [fresh.get(id(request)) or self._kept[id(request)] for request in requests]
