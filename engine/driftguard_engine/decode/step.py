"""One speculative step of a batch: draft, run the target, verify, append."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from driftguard_engine.decode.slots import SlotTable
from driftguard_engine.decode.trees import run_trees
from driftguard_engine.drafters.base import Drafter
from driftguard_engine.kernels import steps
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.reference.verify import Rule
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.kernels.verify import SamplingTensors
from driftguard_engine.models.base import Features, TokenModel, by_row
from driftguard_engine.speculation import KernelVerification, ReferenceVerification, Verification


@dataclass(frozen=True, slots=True)
class Shape:
    """What determines the shapes of a step. narrows: whether any row may ask for top-k or top-p."""

    batch: int
    drafts: int
    narrows: bool


@dataclass(frozen=True, slots=True)
class Step:
    """drafter: None without speculation (K = 0). launcher: None: the reference verifies, on the CPU.

    With kernels, a model on the lean path and a drafter that is `captured`, every shape follows from `shape`
    and nothing is read back, so that a step can be captured in a CUDA graph once and replayed.
    """

    target: TokenModel
    table: SlotTable
    drafter: Drafter | None
    shape: Shape
    launcher: Launcher | None
    rule: Rule = "token"

    @torch.inference_mode()
    def run(self, queued: Tensor) -> Tensor:
        """queued [2, B] int64: slots, and the most draft tokens of each.

        Returns int64 [B, 4 + T], 1 <= T <= K + 1: status (not 0: the target gave no usable logits), drafted,
        accepted, emitted, then T tokens, of which the first `emitted` are valid.
        """
        drafter = self.drafter
        if drafter is not None and drafter.trees:
            return run_trees(self.target, self.table, drafter, queued, self.shape.drafts, self.launcher)
        context = None if drafter is None else drafter.context
        rows = steps.begin(self.launcher, self.table.state, queued, self.shape.drafts, context)
        verification = self._verification(rows)
        if drafter is not None:
            drafter.draft(rows, verification, self.launcher)
        features = None
        if drafter is not None and drafter.exit_layer is not None:
            features = Features(
                drafter.features, drafter.exit_layer, partial(drafter.ahead, rows, verification)
            )
        elif drafter is not None:
            features = Features(drafter.features) if drafter.features else None
            drafter.ahead(rows, verification, None)
        counts = None
        if self.launcher is None or self.target.path != "lean":
            counts = [1 + count for count in rows.drafted.tolist()]
        logits = self.target.decode(rows.fed, rows.starts, rows.slots, counts, features)  # [B, T, V]
        verified = verification.verify(logits)
        if drafter is not None and features is not None and drafter.features:
            read = by_row(features.of(drafter.features), counts or [logits.shape[1]] * len(logits))
            drafter.observe(rows, read, verified.accepted)
        return steps.append(self.launcher, rows, verified.tokens, verified.accepted, verified.status)

    def _verification(self, rows: RowState) -> Verification:
        drafts, vocabulary = self.shape.drafts, self.target.vocabulary
        if self.launcher is None:
            sampling, positions = self.table.sampling(rows.slots), rows.lengths.numpy()
            return ReferenceVerification(sampling, positions, rows.drafted, drafts, vocabulary, self.rule)
        there = SamplingTensors(
            rows.scales, rows.top_ks, rows.top_ps, rows.seeds, rows.lengths, self.shape.narrows
        )
        dtype = self.target.dtype
        return KernelVerification(self.launcher, there, rows.drafted, drafts, vocabulary, dtype, self.rule)
