"""Drafters of trees for tests, and engines that have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from driftguard_engine.config import EngineConfig
from driftguard_engine.core import DraftInfo
from driftguard_engine.drafters.base import Drafter, TreeOutcome
from driftguard_engine.drafters.loaded import LoadedDraft
from driftguard_engine.engine import Engine
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.speculation import TreeVerification
from torch import Tensor


class BigramTree(Drafter):
    """Draws from a law [V, V] that depends on the token before: two children of the root, two of the first of
    them and one of the second, then one of each."""

    trees = True

    def __init__(self, logits: Tensor) -> None:
        self._logits = logits

    def draft_tree(self, rows: RowState, tree: TreeVerification) -> None:
        leaves = [(-1, rows.fed[:, 0])]
        for depth in range(tree.depth):
            found = []
            for place, (parent, token) in enumerate(leaves):
                count = 2 if depth + place < 2 else 1
                logits = self._logits[token.clamp(min=0).to(self._logits.device)]
                columns = tree.draw(logits, [parent], [count])
                found += [(column, tree.tokens[:, column]) for column in columns]
            leaves = found


class AnswerTree(Drafter):
    """Guesses the very answers, each token as the last of three siblings, behind a wrong one that has
    children too, and probes the first. Remembers what it was told."""

    trees = True

    def __init__(
        self, answers: Mapping[tuple[int, ...], Sequence[int]], layers: tuple[int, ...] = ()
    ) -> None:
        """answers: by prompt, no prompt the beginning of another."""
        self._answers, self.features = answers, layers
        self.told: list[tuple[RowState, TreeVerification, TreeOutcome]] = []

    def draft_tree(self, rows: RowState, tree: TreeVerification) -> None:
        right = torch.full((len(rows.slots), tree.depth), -1)
        for row, (slot, length) in enumerate(zip(rows.slots.tolist(), rows.lengths.tolist(), strict=True)):
            text = tuple(rows.state.token_ids[slot, :length].tolist())
            for prompt, answer in self._answers.items():
                if text[: len(prompt)] == prompt:
                    following = answer[length - len(prompt) :][: tree.depth]
                    right[row, : len(following)] = torch.tensor(following)
        parent = -1
        tree.probe(right[:, :1], [-1])
        for depth in range(tree.depth):
            token = right[:, [depth]]
            wrong = torch.where(token < 0, -1, (token + 1) % 50)
            of_wrong = tree.guess(wrong, [parent])[0]
            tree.guess(token, [of_wrong])
            tree.guess(torch.where(token < 0, -1, (token + 2) % 50), [parent])
            parent = tree.guess(token, [parent])[0]

    def observe_tree(self, rows: RowState, tree: TreeVerification, outcome: TreeOutcome) -> None:
        self.told.append((rows, tree, outcome))


def tree_engine(target: str, drafter: Drafter, **settings: Any) -> Engine:
    config = EngineConfig(target, drafter="none", **settings)
    return Engine(config, draft=LoadedDraft(DraftInfo("tree", "tree", "tree"), drafter))
