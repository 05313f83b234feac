"""Suffix lookup where it finds a long match, else a draft model: decided for each row in each step.

As the hybrid of suffix decoding (Oliaro et al. 2024, arXiv:2411.04975) with a model that drafts. What is
looked up are tokens that were emitted, so that the choice depends on no token that is drawn in the step.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from driftguard_engine.drafters.base import Drafter
from driftguard_engine.drafters.suffix import SuffixDrafter
from driftguard_engine.kernels import steps
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.kv_cache import Span
from driftguard_engine.speculation import Verification

logger = logging.getLogger(__name__)


class HybridDrafter(Drafter):
    """See `Drafter`. A row for which a lookup finds something gets that, as guesses; each other row gets what
    `model`, a draft model or a head, draws."""

    obstacle = "it looks up on the host, for which each step waits"
    drafts_fewer = True

    def __init__(self, suffix: SuffixDrafter, model: Drafter) -> None:
        self.model = model
        self.context, self.features, self.recurrent = model.context, model.features, model.recurrent
        self._suffix = suffix
        self._unread: dict[int, int] = {}  # by slot: from where on a model without features has read nothing

    def prefill(self, token_ids: Sequence[int], spans: Sequence[Span], features: Tensor | None, /) -> None:
        """Leaves out what follows tokens that were guessed and that the model has not read: a recurrent model
        could not go on there, and `_catch_up` reads both."""
        if not self._unread:
            self.model.prefill(token_ids, spans, features)
            return
        kept_ids: list[int] = []
        kept_spans: list[Span] = []
        first = 0
        for span in spans:
            if span.slot not in self._unread:
                kept_ids.extend(token_ids[first : first + span.count])
                kept_spans.append(span)
            first += span.count
        if kept_spans:
            self.model.prefill(kept_ids, kept_spans, features)

    def copy(self, source: int, span: Span) -> None:
        self.model.copy(source, span)

    def share(self, slot: int) -> None:
        self.model.share(slot)

    def draft(self, rows: RowState, verification: Verification, launcher: Launcher | None) -> None:
        tokens = verification.draft_tokens
        found = self._suffix.look_up(rows, tokens.shape[1])
        counts, asked = (found >= 0).sum(1), rows.drafted.cpu().clone()
        guessed = counts > 0
        if not self.features:
            self._catch_up(rows, guessed.tolist())
        if guessed.any():
            verification.guess(guessed.nonzero()[:, 0].tolist(), found)
            rows.drafted.copy_(asked.masked_fill(guessed, 0))
        if rows.drafted.any():
            self.model.draft(rows, verification, launcher)
        drawn, owed = rows.drafted.cpu(), ~guessed
        if self.features:  # a head has nothing to draft of one token from, and tells of drafts in turn itself
            owed &= (rows.lengths.cpu() > 1) & self.model.captured
        if bool((drawn < asked)[owed].any()):
            # The target needs no draft: the requests go on with what is usable.
            logger.error("the draft model of the hybrid gives no usable logits")
        if guessed.any():
            rows.drafted.copy_(torch.where(guessed, counts, drawn))
            steps.feed(launcher, rows, tokens, 0, tokens.shape[1])

    def _catch_up(self, rows: RowState, guessed: Sequence[bool]) -> None:
        """Lets the model read what was emitted while its rows were guessed, before it drafts again. Of a
        sequence it reads the last two tokens with each draft."""
        places = zip(rows.slots.tolist(), rows.lengths.tolist(), rows.drafted.tolist(), guessed, strict=True)
        for slot, length, drafted, is_guessed in places:
            end = max(length - 2, 0)
            if is_guessed:
                self._unread.setdefault(slot, end)
            elif drafted and (first := self._unread.pop(slot, end)) < end:
                token_ids = rows.state.token_ids[slot, first:end].tolist()
                self.model.prefill(token_ids, [Span(slot, first, end - first)], None)

    def observe(self, rows: RowState, features: Tensor, accepted: Tensor) -> None:
        self.model.observe(rows, features, accepted)

    def forget(self, slot: int) -> None:
        self._unread.pop(slot, None)
        self.model.forget(slot)
