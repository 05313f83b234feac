"""Drafting inside a step on the device: by a model, or by n-gram lookup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from driftguard_engine.decode.verification import Verification
from driftguard_engine.kernels import ngram, steps
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.steps import DraftContext, RowState
from driftguard_engine.models.llama import LlamaModel


class Drafting(Protocol):
    """certain: see `Verification.verify`. context: see `steps.begin`."""

    certain: bool

    @property
    def context(self) -> DraftContext | None: ...

    def draft(self, rows: RowState, verification: Verification) -> None:
        """Writes verification.draft_tokens, and feeds them by `steps.feed`."""
        ...


@dataclass(frozen=True, slots=True)
class ModelDrafting:
    """K passes of a small model. launcher: None: the reference.

    The first reads the sequence's last two tokens: where all drafts of the step before were accepted, the
    last of them is new to the model, and where they were not, reading one twice changes nothing.
    """

    model: LlamaModel
    launcher: Launcher | None
    certain = False

    @property
    def context(self) -> DraftContext:
        return DraftContext(self.model.max_length, self.model.vocabulary)

    def draft(self, rows: RowState, verification: Verification) -> None:
        tokens, logits, inputs = verification.draft_tokens, verification.draft_logits, rows.draft
        if inputs is None:
            raise ValueError("the step was begun without a draft model")
        size = min(self.model.vocabulary, logits.shape[-1])  # models may pad the same vocabulary differently
        if size < logits.shape[-1]:
            logits[..., size:].fill_(-torch.inf)
        for step in range(tokens.shape[1]):
            token_ids = inputs.token_ids if step == 0 else inputs.next
            chosen = inputs.chosen if step == 0 else None
            self.model.decode_into(logits[:, step, :size], token_ids, chosen, inputs.starts, rows.slots)
            verification.draw(rows, step)
            steps.feed(self.launcher, rows, tokens, step, 1)


@dataclass(frozen=True, slots=True)
class LookupDrafting:
    """N-gram lookup (`kernels.ngram`): what followed the same few tokens earlier in the sequence."""

    min_tokens: int
    max_tokens: int
    launcher: Launcher | None  # None: the reference
    certain = True
    context = None

    def draft(self, rows: RowState, verification: Verification) -> None:
        sequences, tokens = rows.state.token_ids, verification.draft_tokens
        sizes = self.min_tokens, self.max_tokens
        if self.launcher is None:
            tokens.copy_(ngram.reference(sequences[rows.slots], rows.lengths, *sizes, tokens.shape[1]))
        else:
            ngram.look_up(self.launcher, sequences, rows.slots, rows.lengths, *sizes, tokens)
        steps.feed(self.launcher, rows, tokens, 0, tokens.shape[1])
