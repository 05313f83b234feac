"""One speculative step of a batch on the device: draft, run the target, verify, append. Nothing is read back.

Every shape follows from (batch, drafts), so that a step can be captured in a CUDA graph once and replayed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from driftguard_engine.decode.drafting import Drafting
from driftguard_engine.decode.slots import SlotTable
from driftguard_engine.decode.verification import Verification
from driftguard_engine.kernels import steps
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.models.llama import LlamaModel


@dataclass(frozen=True, slots=True)
class Step:
    """drafting: None without speculation (K = 0). new_verification: makes one with memory of its own.
    launcher: None: the reference, on the CPU only."""

    target: LlamaModel
    table: SlotTable
    drafting: Drafting | None
    new_verification: Callable[[], Verification]
    launcher: Launcher | None

    @torch.inference_mode()
    def run(self, queued: Tensor) -> Tensor:
        """queued [2, B] int64: slots, and the most draft tokens of each.

        Returns int64 [B, K + 5]: status (0, or 1: the target gave no usable logits), drafted, accepted,
        emitted, then K + 1 tokens, of which the first `emitted` are valid.
        """
        verification, drafting = self.new_verification(), self.drafting
        drafts, context = verification.draft_tokens.shape[1], drafting.context if drafting else None
        rows = steps.begin(self.launcher, self.table.state, queued, drafts, context)
        if drafting is not None:
            drafting.draft(rows, verification)
        logits = self.target.decode(rows.fed, rows.starts, rows.slots)  # [B, K + 1, V]
        certain = drafting is not None and drafting.certain
        verified = verification.verify(rows, logits, certain=certain)
        return steps.append(self.launcher, rows, verified.tokens, verified.accepted, verified.status)
