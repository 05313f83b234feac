"""Drafting with a head, which reads the target's hidden states: EAGLE-3, EAGLE and MTP by a chain of K
passes, P-EAGLE, DFlash and DSpark by one pass over K places.

Of one pass all distributions are fixed before the first token is drawn. What DSpark adds to a place depends
on the token before it, which is drawn before the place's own.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from driftguard_engine.drafters.base import Drafter
from driftguard_engine.kernels import steps
from driftguard_engine.kernels.cuda.launcher import Launcher
from driftguard_engine.kernels.steps import RowState
from driftguard_engine.kv_cache import Span, slots_and_positions
from driftguard_engine.models.base import by_row
from driftguard_engine.models.chain_heads import ChainModel, ParallelModel
from driftguard_engine.models.dflash import BlockModel
from driftguard_engine.speculation import Verification

logger = logging.getLogger(__name__)

_Model = TypeVar("_Model", bound=ChainModel | BlockModel)


class HeadDrafter(Drafter, Generic[_Model]):
    """See `Drafter`. Keeps the features of all tokens that the target has read."""

    obstacle: str | None = "it reads on the host how far each sequence has come, for which each step waits"

    def __init__(self, model: _Model) -> None:
        self._model = model
        self.features = model.features

    def prefill(self, _token_ids: Sequence[int], spans: Sequence[Span], features: Tensor | None, /) -> None:
        if features is None:
            raise ValueError("the target's features are needed")
        places = self._model.places(*slots_and_positions(spans))
        self._model.keep(features, places.to(features.device))

    def copy(self, source: int, span: Span) -> None:
        self._model.copy(source, span)

    def observe(self, rows: RowState, features: Tensor, accepted: Tensor) -> None:
        # On a GPU where the reference verifies, the state of the rows is on the CPU.
        accepted, starts, slots = (
            each[:, None].to(features.device) for each in (accepted, rows.starts, rows.slots)
        )
        behind = torch.arange(features.shape[1], device=features.device)
        kept = behind <= accepted  # [B, T]
        if kept.any():
            self._model.keep(features[kept], self._model.places(slots, starts + behind)[kept])

    def _drawn(
        self,
        rows: RowState,
        verification: Verification,
        launcher: Launcher | None,
        step: int,
        known: Sequence[int],
        logits: Tensor,
    ) -> None:
        """Draws draft token `step` of the rows `known` from logits [known, V], and feeds it; other rows get
        none."""
        tokens, drawn = verification.draft_tokens, verification.draft_logits[:, step]
        drawn.fill_(-torch.inf)
        if known:
            drawn[known] = logits.to(drawn)
        verification.draw(step)  # nothing where a row has no logits
        if known and bool((tokens[known, step] < 0).any()):
            # The target needs no draft: the requests go on with what is usable.
            logger.error("the head gives no usable logits for draft %d", step + 1)
        steps.feed(launcher, rows, tokens, step, 1)


class ChainDrafter(HeadDrafter[ChainModel]):
    """See `Drafter`. A request of one token that has no prompt before it gets no drafts in its first step.

    Behind a place the head reads a token, so that a place is read once the next token is known. What a chain
    of drafts wrote beyond the target's own features is read again when the target's are there.

    By kernels all rows read equally many places, and nothing waits for a value. Behind each step the head
    reads as many as the target did, with the tokens that the target read: what it writes behind a rejected
    one has no meaning. Before it drafts it reads the last place with features, now with the token behind it.
    """

    def __init__(self, model: ChainModel) -> None:
        super().__init__(model)
        self.captured = model.decodes
        if self.captured:
            self.obstacle = model.kernels_obstacle
        self._read: dict[int, int] = {}  # by slot: places that were read with the target's features

    def prefill(self, token_ids: Sequence[int], spans: Sequence[Span], features: Tensor | None, /) -> None:
        super().prefill(token_ids, spans, features)
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

    def copy(self, source: int, span: Span) -> None:
        first = max(span.start - 1, 0)  # the place before is read with the span's first token
        self._model.copy(source, Span(span.slot, first, span.end - first))

    def draft(self, rows: RowState, verification: Verification, launcher: Launcher | None) -> None:
        if self.captured:
            self._draft_all(rows, verification, launcher)
        else:
            self._draft_wanted(rows, verification, launcher)

    def _draft_all(self, rows: RowState, verification: Verification, launcher: Launcher | None) -> None:
        tokens, (read, place) = verification.draft_tokens, _newest(rows)
        hidden = None
        for step in range(tokens.shape[1]):
            logits, hidden = self._model.predict(self._model.decode(read, place + step, rows.slots, hidden))
            self._draw_all(rows, verification, launcher, step, logits)
            read = tokens[:, step : step + 1].clamp(min=0)

    def _draw_all(
        self, rows: RowState, verification: Verification, launcher: Launcher | None, step: int, logits: Tensor
    ) -> None:
        """Draws draft token `step` of all rows from logits [B, V], and feeds it."""
        drawn = verification.draft_logits[:, step]
        drawn.copy_(logits)
        if step == 0:
            drawn.masked_fill_((rows.lengths < 2)[:, None], -torch.inf)  # they have no place with features
        verification.draw(step)
        steps.feed(launcher, rows, verification.draft_tokens, step, 1)

    def observe(self, rows: RowState, features: Tensor, accepted: Tensor) -> None:
        if not self.captured:
            super().observe(rows, features, accepted)
            return
        count = features.shape[1]
        along = torch.arange(count, device=features.device)
        places = self._model.places(rows.slots[:, None], rows.starts[:, None] + along)
        self._model.keep(features.flatten(0, 1), places.flatten())
        first = (rows.starts - 1).clamp(min=0)  # the place before the newest token, which was read behind it
        behind = ((first - rows.starts + 1)[:, None] + along).clamp(max=rows.fed.shape[1] - 1)
        self._model.decode(rows.fed.gather(1, behind), first, rows.slots)

    def _draft_wanted(self, rows: RowState, verification: Verification, launcher: Launcher | None) -> None:
        tokens, hidden = verification.draft_tokens, torch.empty(0)
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
            logits = torch.empty(0)
            if known:
                logits, after = self._model.predict(output)
                hidden = after.new_empty(len(tokens), after.shape[1])
                hidden[known] = after
            self._drawn(rows, verification, launcher, step, known, logits)

    def _catch_up(self, rows: RowState, wanted: Sequence[int]) -> tuple[list[int], Tensor]:
        """Reads all places that have features and were not read: the rows that have any, and their outputs
        at the last one."""
        known, spans, token_ids = self._unread(rows, wanted)
        if not spans:
            return [], torch.empty(0)
        ends = torch.tensor([span.count for span in spans]).cumsum(0) - 1
        return known, self._model.read([each for ids in token_ids for each in ids], spans)[ends.tolist()]

    def _unread(self, rows: RowState, wanted: Sequence[int]) -> tuple[list[int], list[Span], list[list[int]]]:
        """The rows with places that have features and were not read, these places, and the tokens behind
        them. They count as read."""
        known: list[int] = []
        spans: list[Span] = []
        token_ids: list[list[int]] = []
        for row, (slot, length) in zip(wanted, _places(rows, wanted), strict=True):
            first, end = self._read.get(slot, 0), length - 1
            if first < end:
                known.append(row)
                spans.append(Span(slot, first, end - first))
                token_ids.append(rows.state.token_ids[slot, first + 1 : end + 1].tolist())
                self._read[slot] = end
        return known, spans, token_ids

    def forget(self, slot: int) -> None:
        self._read.pop(slot, None)


class ParallelDrafter(ChainDrafter):
    """See `Drafter`. As `ChainDrafter`, but all K places are read at once, those whose token is not known yet
    with the mask of P-EAGLE."""

    _model: ParallelModel

    def _draft_all(self, rows: RowState, verification: Verification, launcher: Launcher | None) -> None:
        batch, drafts = verification.draft_tokens.shape
        if not drafts:
            return
        newest, place = _newest(rows)
        along = torch.arange(1, drafts, device=place.device)
        self._model.mask(self._model.places(rows.slots[:, None], place[:, None] + along).flatten())
        read = torch.cat([newest, newest.new_full((batch, drafts - 1), self._model.mask_token_id)], 1)
        found, _ = self._model.predict(self._model.decode(read, place, rows.slots))
        logits = found.view(batch, drafts, -1)
        for step in range(drafts):
            self._draw_all(rows, verification, launcher, step, logits[:, step])

    def _draft_wanted(self, rows: RowState, verification: Verification, launcher: Launcher | None) -> None:
        counts, mask = rows.drafted.tolist(), self._model.mask_token_id
        known, spans, token_ids = self._unread(rows, [row for row, count in enumerate(counts) if count])
        masked = [Span(span.slot, span.end, counts[row] - 1) for row, span in zip(known, spans, strict=True)]
        logits = torch.empty(0, 1, 0)
        if known:
            places = self._model.places(*slots_and_positions(masked))
            self._model.mask(places.to(verification.draft_logits.device))
            both = [
                Span(one.slot, one.start, one.count + more.count)
                for one, more in zip(spans, masked, strict=True)
            ]
            read_ids = [
                each
                for ids, more in zip(token_ids, masked, strict=True)
                for each in (*ids, *[mask] * more.count)
            ]
            outputs = torch.split(self._model.read(read_ids, both), [span.count for span in both])
            drafting = [each[-counts[row] :] for row, each in zip(known, outputs, strict=True)]
            found, _ = self._model.predict(torch.cat(drafting))
            logits = by_row(found, [counts[row] for row in known])
        for step in range(logits.shape[1] if any(counts) else 0):
            self._drawn(rows, verification, launcher, step, known, logits[:, step])


class BlockDrafter(HeadDrafter[BlockModel]):
    """See `Drafter`. A block has as many places as in training, however many drafts are asked for; more than
    it has are not drafted."""

    def draft(self, rows: RowState, verification: Verification, launcher: Launcher | None) -> None:
        rows.drafted.clamp_(max=self._model.most)
        counts, tokens, model = rows.drafted.tolist(), verification.draft_tokens, self._model
        wanted = [row for row, count in enumerate(counts) if count]
        if not wanted:
            return
        places = _places(rows, wanted)
        before = torch.stack([rows.state.token_ids[slot, length - 1] for slot, length in places])
        hidden = model.read([Span(slot, length - 1, model.block) for slot, length in places], before)
        state, bias, markov, skipped = None, None, model.markov, model.block - model.most
        for place in range(skipped + max(counts)):
            step = place - skipped
            if markov is not None:
                bias, state = markov.bias(before, hidden[:, place], state)
            if step >= 0:
                logits = model.predict(hidden[:, place], bias)
                self._drawn(rows, verification, launcher, step, wanted, logits)
                before = tokens[wanted, step].clamp(min=0)


def _newest(rows: RowState) -> tuple[Tensor, Tensor]:
    """Of each row the newest token [B, 1] and the place before it [B]. Of a row of one token the place is its
    own, and the token has no meaning."""
    place = (rows.lengths - 2).clamp(min=0)
    return rows.state.token_ids[rows.slots, place + 1][:, None], place


def _places(rows: RowState, wanted: Sequence[int]) -> list[tuple[int, int]]:
    """Slot and length of these rows."""
    slots, lengths = rows.slots.tolist(), rows.lengths.tolist()
    return [(slots[row], lengths[row]) for row in wanted]
