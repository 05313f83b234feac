"""The interface of a draft that is trained and scored."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from driftguard_training.settings import Loss
from driftguard_training.teacher import Told
from driftguard_training.timing import Timed
from driftguard_training.traffic import TrafficRequest


class Draft(ABC):
    """A draft in float32, with the target that it drafts for. `module`: what is trained."""

    directory: Path
    module: nn.Module
    context_tokens: int
    features: tuple[int, ...] = ()  # layers of the target whose hidden states it reads
    tree: Collection[tuple[int, ...]] | None = None  # what it guesses in place of a chain that it draws: each
    # node as the ranks of the tokens on its way, by the logits of the place of its depth
    replay_share: float = 0.25  # of a batch, for what it has learned before
    least_tokens: int = 2  # of prompt and answer together; of fewer there is nothing to draft

    @abstractmethod
    def loss(self, requests: Sequence[TrafficRequest], loss: Loss) -> tuple[Tensor, Tensor]:
        """The mean loss over what it would draft of these answers (scalar), and the acceptance probability
        of each of these tokens [N]. Each request has at least `least_tokens`."""

    @abstractmethod
    def places(self, requests: Sequence[TrafficRequest], told: Told, k: int, /) -> Iterator[list[Tensor]]:
        """For each place of a chain of k drafts, and of each request, the logits [n, V] from which the last n
        tokens of its answer are drafted at that place. The last one stands for those that are not given.

        told: by the target, with the hidden states of `features`.
        """

    @abstractmethod
    def timed(self) -> Timed:
        """What it does to draft, with one request in flight."""

    @abstractmethod
    def save(self, output: Path, facts: Mapping[str, object]) -> str:
        """Writes its directory, atomically; returns its version. `facts`: how it was made."""
