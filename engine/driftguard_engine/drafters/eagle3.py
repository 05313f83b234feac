"""Drafting with an EAGLE-3 head, which reads the target's hidden states: a chain of K passes of one layer."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from driftguard_engine.drafters.base import Drafter
from driftguard_engine.kernels import steps
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.kv_cache import Span
from driftguard_engine.models.eagle3 import Eagle3Model
from driftguard_engine.speculation import Verification

logger = logging.getLogger(__name__)


class Eagle3Drafter(Drafter):
    """See `Drafter`. A request of one token that has no prompt before it gets no drafts in its first step.

    Behind a place the head reads a token, so that a place is read once the next token is known. What a chain
    of drafts wrote beyond the target's own features is read again when the target's are there.
    """

    obstacle = "it reads on the host how far each sequence has come, for which each step waits"

    def __init__(self, model: Eagle3Model) -> None:
        self._model = model
        self.features = model.features
        self._read: dict[int, int] = {}  # by slot: places that were read with the target's features

    def prefill(self, token_ids: Sequence[int], spans: Sequence[Span], features: Tensor | None, /) -> None:
        if features is None:
            raise ValueError("the target's features are needed")
        self._keep(features, spans)
        read_ids: list[int] = []
        read_spans: list[Span] = []
        first = 0
        for span in spans:
            begins = int(span.start == 0)  # no place is before the first token
            read_ids += token_ids[first + begins : first + span.count]
            if span.count > begins:
                read_spans.append(Span(span.slot, span.start - 1 + begins, span.count - begins))
            first += span.count
            self._read[span.slot] = span.end - 1
        if read_spans:
            self._model.read(read_ids, read_spans)

    def _keep(self, features: Tensor, spans: Sequence[Span]) -> None:
        slots = torch.tensor([span.slot for span in spans for _ in range(span.count)])
        positions = torch.tensor([place for span in spans for place in range(span.start, span.end)])
        places = self._model.places(slots, positions)
        self._model.keep(features, places.to(features.device))

    def copy(self, source: int, span: Span) -> None:
        first = max(span.start - 1, 0)  # the place before is read with the span's first token
        self._model.copy(source, Span(span.slot, first, span.end - first))

    def draft(self, rows: RowState, verification: Verification, launcher: Launcher | None) -> None:
        tokens, logits = verification.draft_tokens, verification.draft_logits
        hidden = torch.empty(0)
        for step in range(tokens.shape[1]):
            wanted = [row for row, count in enumerate(rows.drafted.tolist()) if count > step]
            if not wanted:
                return
            if step == 0:
                known, output = self._catch_up(rows, wanted)
            else:
                last = tokens[wanted, step - 1].tolist()
                spans = [Span(slot, length - 2 + step, 1) for slot, length in _places(rows, wanted)]
                known, output = wanted, self._model.read(last, spans, hidden[wanted])
            logits[:, step].fill_(-torch.inf)
            if known:
                found, after = self._model.predict(output)
                logits[known, step] = found.to(logits)
                hidden = after.new_empty(len(tokens), after.shape[1])
                hidden[known] = after
            verification.draw(step)  # nothing where a row has no logits
            if known and bool((tokens[known, step] < 0).any()):
                # The target needs no draft: the requests go on with what is usable.
                logger.error("the EAGLE-3 head gives no usable logits for draft %d", step + 1)
            steps.feed(launcher, rows, tokens, step, 1)

    def _catch_up(self, rows: RowState, wanted: Sequence[int]) -> tuple[list[int], Tensor]:
        """Reads all places that have features and were not read: the rows that have any, and their outputs
        at the last one."""
        known: list[int] = []
        spans: list[Span] = []
        token_ids: list[int] = []
        for row, (slot, length) in zip(wanted, _places(rows, wanted), strict=True):
            first, end = self._read.get(slot, 0), length - 1
            if first < end:
                known.append(row)
                spans.append(Span(slot, first, end - first))
                token_ids += rows.state.token_ids[slot, first + 1 : end + 1].tolist()
                self._read[slot] = end
        if not spans:
            return [], torch.empty(0)
        ends = torch.tensor([span.count for span in spans]).cumsum(0) - 1
        return known, self._model.read(token_ids, spans)[ends.tolist()]

    def observe(self, rows: RowState, features: Tensor, accepted: Tensor) -> None:
        # On a GPU where the reference verifies, the state of the rows is on the CPU.
        accepted, starts, slots = (
            each[:, None].to(features.device) for each in (accepted, rows.starts, rows.slots)
        )
        behind = torch.arange(features.shape[1], device=features.device)
        kept = behind <= accepted  # [B, T]
        if kept.any():
            self._model.keep(features[kept], self._model.places(slots, starts + behind)[kept])

    def forget(self, slot: int) -> None:
        self._read.pop(slot, None)


def _places(rows: RowState, wanted: Sequence[int]) -> list[tuple[int, int]]:
    """Slot and length of these rows."""
    slots, lengths = rows.slots.tolist(), rows.lengths.tolist()
    return [(slots[row], lengths[row]) for row in wanted]
