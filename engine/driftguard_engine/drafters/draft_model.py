"""Drafting with a small model: K forward passes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from driftguard_engine.drafters.base import Drafter
from driftguard_engine.kernels import steps
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.steps import DraftContext, RowState
from driftguard_engine.kv_cache import Span
from driftguard_engine.models.base import TokenModel
from driftguard_engine.speculation import Verification


class DraftModelDrafter(Drafter):
    """See `Drafter`.

    The first pass of a step reads the sequence's last two tokens, each further one the token drafted last:
    where all drafts of the step before were accepted, the last of them is new to the model, and where they
    were not, reading one twice changes nothing.
    """

    def __init__(self, model: TokenModel) -> None:
        self.model = model
        self.context = DraftContext(model.max_length, model.vocabulary)
        self.captured, self.obstacle = model.path == "lean", model.kernels_obstacle
        self.recurrent = model.recurrent

    def prefill(self, token_ids: Sequence[int], spans: Sequence[Span], _features: Tensor | None, /) -> None:
        """Leaves out positions beyond the draft's own context: it will not draft there. Ids that only the
        target has are read as 0: a poor draft, but no error."""
        kept_ids: list[int] = []
        kept_spans: list[Span] = []
        first = 0
        for span in spans:
            count = min(span.count, self.model.max_length - span.start)
            if count > 0:
                kept_ids.extend(token_ids[first : first + count])
                kept_spans.append(Span(span.slot, span.start, count))
            first += span.count
        if kept_spans:
            known = self.model.vocabulary
            self.model.prefill([token if token < known else 0 for token in kept_ids], kept_spans)

    def copy(self, source: int, span: Span) -> None:
        self.model.copy(source, span)

    def share(self, slot: int) -> None:
        self.model.share(slot)

    def draft(self, rows: RowState, verification: Verification, launcher: Launcher | None) -> None:
        self.draft_rows(rows, verification, launcher)

    def draft_rows(
        self,
        rows: RowState,
        verification: Verification,
        launcher: Launcher | None,
        ready: Collection[int] = (),
    ) -> None:
        """As `draft`. ready: rows whose logits are written already, and read by the model."""
        tokens, logits, inputs = verification.draft_tokens, verification.draft_logits, rows.draft
        if inputs is None:
            raise ValueError("the step was begun without a draft model")
        size = min(self.model.vocabulary, logits.shape[-1])  # models may pad the same vocabulary differently
        if size < logits.shape[-1]:
            logits[..., size:].fill_(-torch.inf)
        for step in range(tokens.shape[1]):
            wanted = None
            if launcher is None or not self.captured:  # what reads values anyway computes no pass in vain
                drafting = [count > step for count in rows.drafted.tolist()]
                if not any(drafting):
                    return
                wanted = [drafts and row not in ready for row, drafts in enumerate(drafting)]
            token_ids = inputs.token_ids if step == 0 else inputs.next
            chosen = inputs.chosen if step == 0 else None
            if wanted is None or any(wanted):
                into = logits[:, step, :size]
                self.model.decode_into(into, token_ids, chosen, inputs.starts, rows.slots, wanted)
            verification.draw(step)
            steps.feed(launcher, rows, tokens, step, 1)
