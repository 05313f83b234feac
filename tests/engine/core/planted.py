"""Mistakes of drafters and of what verifies them, to be planted into an engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from driftguard_engine.drafters.heads import HeadDrafter
from driftguard_engine.drafters.hybrid import HybridDrafter
from driftguard_engine.drafters.medusa import MedusaDrafter
from driftguard_engine.drafters.other_vocabulary import SlemDrafter
from driftguard_engine.drafters.own_text import OwnText
from driftguard_engine.kernels import steps
from driftguard_engine.kernels.reference import tree as tree_reference
from driftguard_engine.kernels.reference import verify as reference
from driftguard_engine.kernels.reference.distribution import TokenDistributions
from driftguard_engine.kernels.reference.sampling import EVERY
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.models.chain_heads import ChainModel
from driftguard_engine.models.dflash import BlockModel
from driftguard_engine.speculation import ReferenceVerification
from torch import Tensor

from tests.engine.core.every_drafter import LETTERS

Plant = Callable[[pytest.MonkeyPatch], None]


def verified_by(change: Callable[[Tensor, Tensor], Tensor]) -> Plant:
    """By change(logits [B, V], drawn tokens [B, 1]), behind the draw."""

    def plant(patched: pytest.MonkeyPatch) -> None:
        draw = ReferenceVerification.draw

        def draw_and_change(self: ReferenceVerification, step: int) -> None:
            draw(self, step)
            tokens = self.draft_tokens[:, step : step + 1].clamp(min=0)
            logits = change(self.draft_logits[:, step], tokens)
            drawn = ~self._guessed
            self.draft_logits[drawn, step] = logits[drawn]
            given = reference.draft_distributions(logits[:, np.newaxis].numpy(), self._sampling)
            rows = drawn.nonzero()[0]
            self._distributions.put(rows, slice(step, step + 1), given.rows(rows))

        patched.setattr(ReferenceVerification, "draw", draw_and_change)

    return plant


# The drawn token then counts as likelier than it was when it was drawn.
q_taken_after_the_draw = verified_by(
    lambda logits, tokens: logits.scatter_add(1, tokens, torch.ones(len(tokens), 1))
)
# They are never drawn, but have a part of q.
q_of_tokens_that_the_map_cannot_reach = verified_by(
    lambda logits, tokens: logits.masked_fill(logits == -torch.inf, 3.0)
)


def drawn_from_another_law(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(reference, "draw_drafts", lambda logits, *_: logits.argmax(-1))


def cut_by_the_confidence_of_drawn_tokens(patched: pytest.MonkeyPatch) -> None:
    """A chain ends before the first token that was drawn with a probability below a third."""
    draw = ReferenceVerification.draw

    def draw_and_cut(self: ReferenceVerification, step: int) -> None:
        draw(self, step)
        tokens = self.draft_tokens[:, step : step + 1]
        q = self.draft_logits[:, step].softmax(-1).gather(1, tokens.clamp(min=0))
        tokens[q < 1 / 3] = -1

    patched.setattr(ReferenceVerification, "draw", draw_and_cut)


def residual_without_the_draft(patched: pytest.MonkeyPatch) -> None:
    """Behind a rejection p itself stands for (p - q)+, normalised."""
    patched.setattr(reference, "_excess", lambda weights, *_: weights[:, 0])


def residual_not_normalised(patched: pytest.MonkeyPatch) -> None:
    patched.setattr(tree_reference, "_normalised", lambda mass, _otherwise: mass)


def siblings(change: Callable[[Any, Any], tuple[Any, Any]]) -> Plant:
    def plant(patched: pytest.MonkeyPatch) -> None:
        draw = tree_reference.draw_siblings
        patched.setattr(tree_reference, "draw_siblings", lambda *given: change(*draw(*given)))

    return plant


def _raised(tokens: Any, law: Any) -> tuple[Any, Any]:
    law[np.arange(len(law)), tokens[:, 0]] += 0.2
    return tokens, law / law.sum(-1, keepdims=True)


children_in_another_order = siblings(lambda tokens, law: (tokens[:, ::-1].copy(), law))
q_of_siblings_taken_after_the_draw = siblings(_raised)


def hybrid_that_drafts_all_rows(guesses_of: Callable[[Tensor, Tensor], Tensor], certain: bool) -> Plant:
    """The model draws for every row, then guesses_of(guesses, draws) says which rows are guessed after all.
    certain: they are verified as guesses, else by the model's distribution."""

    def draft(
        self: HybridDrafter, rows: RowState, verification: ReferenceVerification, launcher: None
    ) -> None:
        tokens = verification.draft_tokens
        self.model.draft(rows, verification, launcher)
        found = self._suffix.look_up(rows, tokens.shape[1])
        chosen = ((found >= 0).sum(1) == rows.drafted) & guesses_of(found, tokens) & (rows.drafted > 0)
        index = chosen.nonzero()[:, 0].tolist()
        if certain:
            verification._guessed[index] = True
            known = TokenDistributions.certain(verification._sampling, tokens.shape[1], LETTERS)
            at = np.array(index, np.int64)
            verification._distributions.put(at, EVERY, known.rows(at))
        tokens[index] = found[index]
        steps.feed(launcher, rows, tokens, 0, tokens.shape[1])

    return lambda patched: patched.setattr(HybridDrafter, "draft", draft)


guesses_verified_by_the_models_q = hybrid_that_drafts_all_rows(
    lambda guesses, draws: torch.ones(len(guesses), dtype=torch.bool), certain=False
)
guesses_chosen_after_the_draw = hybrid_that_drafts_all_rows(
    lambda guesses, draws: guesses[:, 0] == draws[:, 0], certain=True
)
# No mistake: so that what is caught of the others is the mistake, not the way in which it is planted.
hybrid_that_guesses_nothing = hybrid_that_drafts_all_rows(
    lambda guesses, draws: torch.zeros(len(guesses), dtype=torch.bool), certain=True
)


def residual_over_the_law_that_is_not_masked(patched: pytest.MonkeyPatch) -> None:
    """q as if the draft had drawn from all of its tokens: what it gives those of two letters is nowhere."""
    draw = reference.draft_distributions

    def leaky(logits: Any, *given: Any) -> Any:
        found = draw(logits, *given)
        found.normaliser[...] *= 1.6
        return found

    patched.setattr(reference, "draft_distributions", leaky)


def guesses_that_know_what_verifies_them(patched: pytest.MonkeyPatch) -> None:
    """Every other guess is dropped where it would be rejected: by the random number that verifies it."""
    draft = SlemDrafter.draft

    def choose(self: SlemDrafter, rows: Any, verification: ReferenceVerification, launcher: None) -> None:
        rows.drafted[torch.from_numpy(verification._noise.accept[:, 0] > 0.5)] = 0
        draft(self, rows, verification, launcher)

    patched.setattr(SlemDrafter, "draft", choose)


def stale_features(patched: pytest.MonkeyPatch) -> None:
    """Of accepted tokens the features of the token before are kept; of trees those of the newest token."""
    observe, observe_tree = HeadDrafter.observe, MedusaDrafter.observe_tree

    def late(self: Any, rows: RowState, features: Tensor, accepted: Tensor) -> None:
        observe(self, rows, torch.cat((features[:, :1], features[:, :-1]), 1), accepted)

    def first_alone(self: Any, rows: Any, tree: Any, outcome: Any) -> None:
        observe_tree(self, rows, tree, replace(outcome, accepted=outcome.accepted.clamp(max=0)))

    patched.setattr(HeadDrafter, "observe", late)
    patched.setattr(MedusaDrafter, "observe_tree", first_alone)


def features_of_rejected_tokens_kept(patched: pytest.MonkeyPatch) -> None:
    """What is kept first of a place stays, that of a rejected token too; of trees that of another node."""
    observe, observe_tree, written = HeadDrafter.observe, MedusaDrafter.observe_tree, set[tuple[int, int]]()

    def observe_all(self: Any, rows: RowState, features: Tensor, accepted: Tensor) -> None:
        observe(self, rows, features, rows.drafted)

    def first_only(keep: Any) -> Any:
        def keep_first(self: Any, features: Tensor, places: Tensor) -> None:
            keys = [(id(self), place) for place in places.tolist()]
            new = [index for index, key in enumerate(keys) if key not in written]
            written.update(keys)
            if new:
                keep(self, features[new], places[new])

        return keep_first

    def of_other_nodes(self: Any, rows: Any, tree: Any, outcome: Any) -> None:
        observe_tree(self, rows, tree, replace(outcome, features=outcome.features.roll(1, 1)))

    patched.setattr(HeadDrafter, "observe", observe_all)
    for model in (ChainModel, BlockModel):
        patched.setattr(model, "keep", first_only(model.keep))
    patched.setattr(MedusaDrafter, "observe_tree", of_other_nodes)


def stale_text(patched: pytest.MonkeyPatch) -> None:
    """The newest token of a text is not read, once it has begun."""
    extend = OwnText.extend

    def extend_late(self: OwnText, token_ids: Sequence[int]) -> None:
        late = bool(self.read)
        extend(self, token_ids[:-1] if late else token_ids)
        self.read += len(token_ids[-1:]) if late else 0

    patched.setattr(OwnText, "extend", extend_late)
