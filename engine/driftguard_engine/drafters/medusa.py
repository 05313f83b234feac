"""Drafting with Medusa heads (Cai et al. 2024): each guesses the token of one place from the target's last
hidden state, and their likeliest tokens make a tree of fixed shape."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from driftguard_engine.drafters.base import Drafter, TreeOutcome
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.kv_cache import Span, slots_and_positions
from driftguard_engine.models.medusa import PlacesModel
from driftguard_engine.speculation import TreeVerification


class MedusaDrafter(Drafter):
    """See `Drafter`. A prompt of one token gets no drafts in the first step: the target has read nothing
    yet."""

    trees = True
    obstacle = "it drafts trees, which are verified on the host, for which each step waits"

    def __init__(self, model: PlacesModel, layer: int) -> None:
        """layer: whose hidden states the model reads, as `Features` counts them."""
        self._model = model
        self.features = (layer,)

    def prefill(self, _token_ids: Sequence[int], spans: Sequence[Span], features: Tensor | None, /) -> None:
        if features is None:
            raise ValueError("the target's features are needed")
        self._model.keep(features, *slots_and_positions(spans))

    def copy(self, source: int, span: Span) -> None:
        self._model.copy(source, span)

    def draft_tree(self, rows: RowState, tree: TreeVerification) -> None:
        depth = min(tree.depth, self._model.heads)
        shape = [path for path in self._model.choices if len(path) <= depth]
        known = rows.lengths >= 2
        columns: dict[tuple[int, ...], int] = {(): -1}
        predictions = self._model.predictions(rows.slots, rows.lengths, rows.drafted)
        for head, logits in zip(range(depth), predictions, strict=False):
            nodes = [path for path in shape if len(path) == head + 1]
            if not nodes:
                return
            most = 1 + max(path[-1] for path in nodes)
            likeliest, tokens = logits.topk(min(most, logits.shape[1]))
            tokens = tokens.masked_fill(~likeliest.isfinite() | ~known[:, None].to(tokens.device), -1)
            nodes = [path for path in nodes if path[-1] < tokens.shape[1] and path[:-1] in columns]
            guessed = tree.guess(
                tokens[:, [path[-1] for path in nodes]], [columns[path[:-1]] for path in nodes]
            )
            columns |= dict(zip(nodes, guessed, strict=True))

    def observe_tree(self, rows: RowState, _tree: TreeVerification, outcome: TreeOutcome, /) -> None:
        if outcome.features is None:
            raise ValueError("the target's features are needed")
        behind = torch.arange(outcome.features.shape[1])
        kept = behind <= outcome.accepted[:, None]  # [B, D + 1]
        slots = rows.slots.cpu()[:, None].expand_as(kept)
        positions = rows.starts.cpu()[:, None] + behind
        self._model.keep(outcome.features[kept.to(outcome.features.device)], slots[kept], positions[kept])
