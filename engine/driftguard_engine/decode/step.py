"""One speculative step of a batch on the device: draft, run the target, verify, append. Nothing is read back.

Every shape follows from (batch, drafts), so that a step can be captured in a CUDA graph once and replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from driftguard_engine.decode.drafting import Drafting
from driftguard_engine.decode.slots import RowState, SlotTable
from driftguard_engine.decode.verification import Verification
from driftguard_engine.kernels.backend import Verified
from driftguard_engine.models.llama import LlamaModel


@dataclass(frozen=True, slots=True)
class Step:
    """drafting: None without speculation (K = 0). new_verification: makes one with memory of its own."""

    target: LlamaModel
    table: SlotTable
    drafting: Drafting | None
    new_verification: Callable[[], Verification]

    @torch.inference_mode()
    def run(self, queued: Tensor) -> Tensor:
        """queued [2, B] int64: slots, and the most draft tokens of each.

        Returns int64 [B, K + 5]: status (0, or 1: the target gave no usable logits), drafted, accepted,
        emitted, then K + 1 tokens, of which the first `emitted` are valid.
        """
        rows, verification = self.table.rows(queued[0]), self.new_verification()
        drafted = queued[1].minimum(rows.limits - rows.lengths - 1).clamp(min=0) * ~rows.ended
        if self.drafting is not None:
            drafted = drafted.minimum(self.drafting.draft(rows, self.table, verification))
        newest = self.table.tokens_at(rows, rows.lengths - 1, 1)
        fed = torch.cat([newest, verification.draft_tokens.clamp(min=0)], 1)
        logits = self.target.decode(fed, rows.lengths - 1, rows.slots)  # [B, K + 1, V]
        certain = self.drafting is not None and self.drafting.certain
        verified = verification.verify(rows, logits, drafted, certain=certain)
        return self._append(rows, drafted, verified)

    def _append(self, rows: RowState, drafted: Tensor, verified: Verified) -> Tensor:
        failed, tokens = verified.status != 0, verified.tokens
        counts = (verified.accepted + 1) * ~(rows.ended | failed)
        column = torch.arange(tokens.shape[1], device=tokens.device)
        # Not torch.isin: for many values it sorts them, and then waits for the device to count them.
        ends = (tokens[..., None] == self.table.eos_token_ids).any(-1) & rows.heeds_ends[:, None]
        ends &= column < counts[:, None]
        first_end = torch.where(ends, column, tokens.shape[1]).amin(1)
        counts = counts.minimum(first_end + 1)
        over = rows.ended | failed | ends.any(1) | (rows.lengths + counts >= rows.limits)
        self.table.append(rows, tokens, counts, over)
        columns = [verified.status.long() * ~rows.ended, drafted, verified.accepted, counts]
        return torch.cat([torch.stack(columns, 1), tokens], 1)
