"""Drafting inside a step on the device: by a model, or by n-gram lookup."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from driftguard_engine.decode.slots import RowState, SlotTable
from driftguard_engine.decode.verification import Verification
from driftguard_engine.drafters.draft_model import fitted
from driftguard_engine.kernels import ngram
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.models.llama import LlamaModel


class Drafting(Protocol):
    """certain: see `Verification.verify`."""

    certain: bool

    def draft(self, rows: RowState, table: SlotTable, verification: Verification) -> Tensor:
        """Writes into verification.draft_tokens; returns how many drafts each row has, [B] int64, <= K."""
        ...


@dataclass(frozen=True, slots=True)
class ModelDrafting:
    """K passes of a small model.

    The first reads the sequence's last two tokens: where all drafts of the step before were accepted, the
    last of them is new to the model, and where they were not, reading one twice changes nothing.
    """

    model: LlamaModel
    vocabulary: int  # the target's V; the draft's logits are cut or filled with -inf to it
    certain = False

    def draft(self, rows: RowState, table: SlotTable, verification: Verification) -> Tensor:
        tokens = verification.draft_tokens
        starts = (rows.lengths - 2).clamp(0, self.model.max_length - 2)
        logits = self.model.decode(self._known(table.tokens_at(rows, starts, 2)), starts, rows.slots)
        newest = (rows.lengths - 1 - starts).clamp(max=1)
        self._draw(
            rows, logits.gather(1, newest[:, None, None].expand(-1, 1, logits.shape[-1])), verification, 0
        )
        for step in range(1, tokens.shape[1]):
            place = (rows.lengths + step - 1).clamp(max=self.model.max_length - 1)
            fed = self._known(tokens[:, step - 1 : step].clamp(min=0))
            self._draw(rows, self.model.decode(fed, place, rows.slots), verification, step)
        usable = (tokens >= 0).long().cumprod(1).sum(1)
        return usable.minimum((self.model.max_length - rows.lengths + 1).clamp(min=0))

    def _draw(self, rows: RowState, logits: Tensor, verification: Verification, step: int) -> None:
        verification.draw(rows, fitted(logits[:, 0], self.vocabulary), step)

    def _known(self, token_ids: Tensor) -> Tensor:
        """Replaces padding ids that only the target has by 0: a poor draft, but no error."""
        return torch.where(token_ids < self.model.vocabulary, token_ids, 0)


@dataclass(frozen=True, slots=True)
class LookupDrafting:
    """N-gram lookup (`kernels.ngram`): what followed the same few tokens earlier in the sequence."""

    min_tokens: int
    max_tokens: int
    launcher: Launcher | None  # None: the reference
    certain = True

    def draft(self, rows: RowState, table: SlotTable, verification: Verification) -> Tensor:
        sequences, tokens = table.token_ids[rows.slots], verification.draft_tokens
        lengths = rows.lengths.int()
        if self.launcher is None:
            found, counts = ngram.reference(
                sequences, lengths, self.min_tokens, self.max_tokens, tokens.shape[1]
            )
            tokens.copy_(found)
            return counts.long()
        counts = torch.empty_like(lengths)
        ngram.look_up(self.launcher, sequences, lengths, self.min_tokens, self.max_tokens, tokens, counts)
        return counts.long()
